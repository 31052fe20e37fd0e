#!/usr/bin/env bash
# Written by: {{ command }}
# bash run.sh [USER/NAME]: with a repository, an accepted head is pushed there.
# A finished step leaves .done in its folder and does not run again; an interrupted step continues. If you change a
# config, delete the folders made with the old one.
set -euo pipefail
cd {{ here | sh }}
export PATH={{ bin | sh }}:"$PATH"
out={{ out | sh }}
hub=${1:-}
{% macro step(name, folder, about) %}

# {{ name }}: {{ about }}
if [ ! -e "$out/{{ folder }}/.done" ]; then
  echo "== $(date +%H:%M) {{ name }}: {{ about }}"
{{ caller() }}  touch "$out/{{ folder }}/.done"
fi
{% endmacro %}
{% set template = " --chat-template " ~ (chat_template | sh) if chat_template else "" %}
{% set apart = '--apart-from "$out/traffic/train.jsonl" --apart-from "$out/traffic/valid.jsonl" --apart-from "$out/traffic/heldout.jsonl"' %}
{% macro gate() %}
  python -m eval.gate --target {{ target | sh }} --drafter {{ drafter | sh }} --traffic "$out/traffic/heldout.jsonl" \
    {{ "--guard %s " % (guard | sh) if guard }}{{ apart }} \
    --most-loss {{ most_loss }} --longest {{ longest }} --new-tokens {{ new_tokens }}{{ template }} --out "$out/gate"
{%- endmacro %}
{% call step("traffic", "traffic", "split the log, the newest conversations held out") %}
  python -m data_prep.traffic {{ traffic | sh }} --target {{ target | sh }} --conversations {{ conversations }}{{ template }} \
    --out "$out/traffic"
{% endcall %}
{% call step("before", "gate/before", "measure the present head") %}
{{ gate() }}
{% endcall %}
{% call step("features", "features", "compute the target's states, and test that the answers are its own") %}
  python -m data_prep.features --config "$out/configs/features.yaml"
  python -m data_prep.inspect "$out/features/train" --own
{% endcall %}
{% call step("train", method, "adapt it") %}
  python {{ script | sh }} --config "$out/configs/{{ method }}.yaml" \
    $([ -e "$out/{{ method }}/state/latest" ] && echo --resume || true)
{% endcall %}

# gate: the new head is accepted, or the present one stays
{{ gate() }} --changed "$out/{{ method }}"
{% if lossless %}
{% call step("lossless", "lossless", "test that the output is the target's") %}
  # A drafter that is not lossless ends the script; the card says if too little was tested.
  python -m eval.lossless --config "$out/configs/lossless.yaml" \
    || grep -q '"verdict": "not shown' "$out/lossless/lossless.json"
{% endcall %}
{% endif %}
{% macro push(name, more) %}
  python -m drafters.hub push "$out/{{ method }}" {{ name }} --report "$out/gate/after/traffic" \
    --figures "$out/gate/figures.json"{{ ' --certificate "$out/lossless"' if lossless }}{{ more }}
{%- endmacro %}

if [ -z "$hub" ]; then
{%- call step("card", "card", "write the model card") %}
  mkdir -p "$out/card"
{{ push(("you/" ~ name) | sh, ' --card "$out/card/README.md"') }}
{% endcall %}
else
{%- call step("push", "push/$hub", "write the model card, publish") %}
{{ push('"$hub"', "") }}
  mkdir -p "$out/push/$hub"
{% endcall %}
fi

echo "== $(date +%H:%M) accepted: $out/{{ method }} ($out/gate/gate.md)"
