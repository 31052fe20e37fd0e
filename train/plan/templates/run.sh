#!/usr/bin/env bash
# Written by: {{ command }}
# About {{ "%.1f" % ((seconds.values() | sum) / 60) }} minutes in all. A finished step leaves .done in its folder and does not run again; an
# interrupted step continues. If you change a config, delete the folders made with the old one.
set -euo pipefail
cd {{ here | sh }}
export PATH={{ bin | sh }}:"$PATH"
out={{ out | sh }}
{% macro step(name, folder) %}

{% set about = "%s, about %.1f minutes" % (name, seconds[name] / 60) %}
# {{ about }}
if [ ! -e "$out/{{ folder }}/.done" ]; then
  echo "== $(date +%H:%M) {{ about }}"
{{ caller() }}  touch "$out/{{ folder }}/.done"
fi
{% endmacro %}
{% set on_all = "python" if gpus == 1 else "torchrun --standalone --nproc-per-node " ~ gpus %}
{% if asks %}
{% call step("magpie", "asked") %}
  {{ on_all }} -m data_prep.magpie --config "$out/configs/magpie.yaml"
{% endcall %}
{% endif %}
{% call step("split", "split") %}
  python -m data_prep.split {{ (asked if asks else data) | sh }} --out "$out/split" --heldout {{ heldout }}{{ " --unanswered" if asks }}
{% endcall %}
{% if not own %}
{% call step("regenerate", "answers") %}
  {{ on_all }} -m data_prep.regenerate --config "$out/configs/regenerate.yaml" source="$out/split/heldout.jsonl" \
    out="$out/answers/heldout.jsonl" minutes={{ [0.1 * answer_minutes, 0.5] | max | round(2) }}
  {{ on_all }} -m data_prep.regenerate --config "$out/configs/regenerate.yaml"
{% endcall %}
{% endif %}
{% if not online %}
{% call step("features", "features") %}
  {{ on_all }} -m data_prep.features --config "$out/configs/features.yaml"
{% endcall %}
{% endif %}
{% call step("train", method) %}
  {{ "python" if gpus == 1 else "deepspeed" }} {{ script | sh }} --config "$out/configs/{{ method }}.yaml" \
    $([ -e "$out/{{ method }}/state/latest" ] && echo --resume || true)
{% endcall %}
{% call step("speed", "speed") %}
  python -m eval.speed --config "$out/configs/speed.yaml"
{% endcall %}
{% if "lossless" in seconds %}
{% call step("lossless", "lossless") %}
  # A drafter that is not lossless ends the script; the card says if too little was tested.
  python -m eval.lossless --config "$out/configs/lossless.yaml" \
    || grep -q '"verdict": "not shown' "$out/lossless/lossless.json"
{% endcall %}
{% endif %}
{% call step("push" if hub else "card", "card") %}
  mkdir -p "$out/card"
  python -m drafters.hub push "$out/{{ method }}" {{ (hub or "you/" ~ name) | sh }} --report "$out/speed"
  {%- if "lossless" in seconds %} --certificate "$out/lossless"{% endif %}
  {%- if not hub %} --card "$out/card/README.md"{% endif %}

{% endcall %}

echo "== $(date +%H:%M) finished: $out/speed/report.md; the drafter: $out/{{ method }}"
