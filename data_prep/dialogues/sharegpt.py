"""Write dialogues as ShareGPT records."""

from data_prep.dialogues.reader import Dialogue

FROM = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


def record(dialogue: Dialogue) -> dict[str, object]:
    """The ShareGPT record of a dialogue."""
    turns = [
        {"from": FROM[message["role"]], "value": message["content"]}
        | {key: value for key, value in message.items() if key not in ("role", "content", "tools")}
        for message in dialogue.messages
    ]
    category = {"category": dialogue.category} if dialogue.category else {}
    tools = {"tools": dialogue.messages[0]["tools"]} if "tools" in dialogue.messages[0] else {}
    return {"id": dialogue.id, **category, **tools, "conversations": turns}


def unanswered_record(name: str, question: str) -> dict[str, object]:
    """The ShareGPT record of a question without an answer."""
    return {"id": name, "conversations": [{"from": FROM["user"], "value": question}]}


def same_question(text: str) -> str:
    """A key that is equal for questions that differ only in case and white space."""
    return " ".join(text.lower().split())
