"""llama.cpp through llama-cpp-python, one prompt at a time; it does not report steps, so there is no tau."""

import tempfile
import time
from pathlib import Path
from typing import Any

from eval.engine_workers.protocol import serve


class LlamaCpp:
    """An engine for one row of the report."""

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._job = job
        if job["repack"] is False:
            _leave_out_repacking(llama_cpp.llama_cpp)
        lookup = LlamaPromptLookupDecoding(max_ngram_size=job["max_ngram"], num_pred_tokens=job["gamma"])
        with tempfile.TemporaryDirectory() as folder:
            file = job["gguf"] if job["gguf_type"] is None else _converted(llama_cpp, job, folder)
            self._engine = llama_cpp.Llama(
                file,
                n_ctx=job["max_context"],
                n_threads=job["threads"],
                n_threads_batch=job["threads"],
                draft_model=lookup if job["method"] == "prompt_lookup" else None,
                logits_all=job["method"] == "prompt_lookup",  # verification reads the logits of every draft token
                use_mmap=False,  # the file may be temporary
                verbose=False,
            )
        described = self._engine.metadata.get("general.file_type", "")
        names = {
            getattr(llama_cpp, name): name.removeprefix("LLAMA_FTYPE_MOSTLY_").removeprefix("LLAMA_FTYPE_ALL_")
            for name in dir(llama_cpp)
            if name.startswith("LLAMA_FTYPE_")
        }
        weights = names.get(int(described), described) if described.isdigit() else described
        facts = {"weights": weights, "threads": job["threads"]}
        facts |= {"without": "repacked weights"} if job["repack"] is False else {}
        self.facts = {"engine": "llama.cpp", "version": f"python {llama_cpp.__version__}", **facts}

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """See ``protocol.Engine``."""
        engine, job = self._engine, self._job
        eos = set(job["eos"])
        engine.reset()  # else it reuses the common beginning with the previous prompt
        engine.set_seed(seed)
        top_k, top_p = (job["top_k"], job["top_p"]) if temperature > 0 else (0, 1.0)
        tokens: list[int] = []
        start = first = time.perf_counter()
        for token in engine.generate(
            ids, top_k=top_k, top_p=top_p, min_p=0.0, typical_p=1.0, temp=temperature, repeat_penalty=1.0
        ):
            if not tokens:
                first = time.perf_counter()
            tokens.append(int(token))
            if token in eos or len(tokens) == max_new_tokens:
                break
        end = time.perf_counter()
        unknown = dict.fromkeys(("commits", "drafted", "accepted"))
        return {"tokens": tokens, "prefill_seconds": first - start, "decode_seconds": end - first, **unknown}


def _leave_out_repacking(bindings: Any) -> None:
    """Turn off repacking of weights in the default settings, because ``Llama`` has no argument for it."""
    defaults = bindings.llama_model_default_params

    def changed() -> Any:
        settings = defaults()
        settings.use_extra_bufts = False
        return settings

    bindings.llama_model_default_params = changed


def _converted(llama_cpp: Any, job: dict[str, Any], folder: str) -> str:
    """Convert the weights of a GGUF file to another type with llama.cpp's tool; return the new file."""
    import ctypes

    file = str(Path(folder) / "model.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['gguf_type']}")
    settings.allow_requantize = True  # the file may be quantised already
    status = llama_cpp.llama_model_quantize(job["gguf"].encode(), file.encode(), ctypes.byref(settings))
    if status:
        raise ValueError(f"llama.cpp cannot write {job['gguf']} as {job['gguf_type']} (status {status})")
    return file


if __name__ == "__main__":
    serve(LlamaCpp)
