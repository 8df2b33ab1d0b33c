"""Chat templates of families of models, written after the documented forms of their calls.

The templates of the models themselves are not at hand here. These write what the families' model
cards document, in the shape that chat templates have: tools, turns, reasoning, calls.
"""

from __future__ import annotations

BAR, LOW = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    """A token of DeepSeek's."""
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


def _turns(calls: str, thought: str = "") -> str:
    """A template in the manner of ChatML whose assistant writes reasoning and calls like this."""
    return (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
        "{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{thought}{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_ARGS = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ '\"' + v + '\"' if v is string else v }}{% if not loop.last %}, {% endif %}{% endfor %})"
)
_HERMES = (
    _EACH + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_XML = (
    _EACH + "\n<tool_call>\n<function={{ f.name }}>\n" + _ARGS + "<parameter={{ k }}>\n" + _VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)  # fmt: skip
_GLM = (
    _EACH + "\n<tool_call>{{ f.name }}\n" + _ARGS + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + _VALUE + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)  # fmt: skip
_SEED = (
    "\n<seed:tool_call>\n" + _EACH + "<function={{ f.name }}>\n" + _ARGS + "<parameter={{ k }}>"
    + _VALUE + "</parameter>\n{% endfor %}</function>{% if not loop.last %}\n{% endif %}"
    "{% endfor %}\n</seed:tool_call>"
)  # fmt: skip
_MINIMAX = (
    "\n<minimax:tool_call>\n" + _EACH + '<invoke name="{{ f.name }}">\n' + _ARGS
    + '<parameter name="{{ k }}">' + _VALUE + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>"
)  # fmt: skip
_DSML = (
    f"\n<{BAR}DSML{BAR}function_calls>\n" + _EACH
    + f'<{BAR}DSML{BAR}invoke name="{{{{ f.name }}}}">\n' + _ARGS
    + f'<{BAR}DSML{BAR}parameter name="{{{{ k }}}}" string="'
    "{{ 'true' if v is string else 'false' }}\">" + _VALUE + f"</{BAR}DSML{BAR}parameter>\n"
    f"{{% endfor %}}</{BAR}DSML{BAR}invoke>\n{{% endfor %}}</{BAR}DSML{BAR}function_calls>"
)  # fmt: skip
_DEEPSEEK = (
    deepseek("tool calls begin") + _EACH + "{% if not loop.first %}\n{% endif %}"
    + deepseek("tool call begin") + "function" + deepseek("tool sep")
    + "{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```" + deepseek("tool call end")
    + "{% endfor %}" + deepseek("tool calls end")
)  # fmt: skip
_DEEPSEEK_31 = (
    deepseek("tool calls begin") + _EACH + deepseek("tool call begin") + "{{ f.name }}"
    + deepseek("tool sep") + "{{ f.arguments | tojson }}" + deepseek("tool call end")
    + "{% endfor %}" + deepseek("tool calls end")
)  # fmt: skip
_KIMI = (
    "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>functions.{{ f.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>"
)
_GEMMA = (
    _EACH + "<|tool_call>call:{{ f.name }}{{ '{' }}" + _ARGS + "{{ k }}:{% if v is string %}"
    '<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}'
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
)
_MISTRAL = _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
_MISTRAL_LIST = (
    "[TOOL_CALLS][" + _EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_COMMAND = (
    "<|START_ACTION|>[\n" + _EACH + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": '
    '"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% if not loop.last %},\n{% endif %}'
    "{% endfor %}\n]<|END_ACTION|>"
)
_PHI = _MISTRAL_LIST.replace("[TOOL_CALLS]", "<|tool_call|>") + "<|/tool_call|>"
_LFM = (
    "<|tool_call_start|>[" + _EACH + _PYTHON + "{% if not loop.last %}, {% endif %}{% endfor %}]"
    "<|tool_call_end|>"
)
_OLMO = "<function_calls>\n" + _EACH + _PYTHON + "\n{% endfor %}</function_calls>"
_LLAMA4 = "[" + _EACH + _PYTHON + "{% if not loop.last %}, {% endif %}{% endfor %}]"
_LLAMA3 = (
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('only one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
)
_HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "Reasoning: {{ reasoning_effort or 'medium' }}{{ tools }}"
)


def _thought(start: str, end: str) -> str:
    return f"{{% if m.reasoning_content %}}{start}{{{{ m.reasoning_content }}}}{end}{{% endif %}}"


# Name -> source, the form of calls, the form of reasoning.
FAMILIES: dict[str, tuple[str, str, str | None]] = {
    "qwen3": (_turns(_HERMES, _thought("<think>\n", "\n</think>\n\n")), "hermes", "think"),
    "qwen3.5": (_turns(_XML, _thought("<think>\n", "\n</think>\n\n")), "qwen3-coder", "think"),
    "granite4": (_turns(_HERMES), "hermes", None),
    "glm": (_turns(_GLM, _thought("<think>", "</think>\n")), "glm", "think"),
    "seed-oss": (
        _turns(_SEED, _thought("<seed:think>", "</seed:think>")),
        "seed-oss",
        "seed",
    ),
    "minimax": (_turns(_MINIMAX, _thought("<think>\n", "\n</think>\n\n")), "minimax", "think"),
    "deepseek-v3.2": (_turns(_DSML, _thought("<think>", "</think>")), "deepseek-dsml", "think"),
    "deepseek-v3": (_turns(_DEEPSEEK), "deepseek-v3", None),
    "deepseek-v3.1": (_turns(_DEEPSEEK_31, _thought("<think>", "</think>")),
                      "deepseek-v3.1", "think"),
    "kimi-k2": (_turns(_KIMI, _thought("<think>", "</think>")), "kimi-k2", "think"),
    "gemma4": (
        _turns(_GEMMA, _thought("<|channel>thought\n", "<channel|>")),
        "gemma4",
        "gemma4",
    ),
    "mistral": (_turns(_MISTRAL, _thought("[THINK]", "[/THINK]")), "mistral", "mistral"),
    "old mistral": (_turns(_MISTRAL_LIST), "mistral", None),
    "command": (
        _turns(_COMMAND, _thought("<|START_THINKING|>", "<|END_THINKING|>")),
        "command",
        "command",
    ),
    "phi4-mini": (_turns(_PHI), "phi4-mini", None),
    "lfm2": (_turns(_LFM), "lfm2", None),
    "olmo3": (_turns(_OLMO), "olmo3", None),
    "llama4": (_turns(_LLAMA4), "llama4", None),
    "llama3": (_turns(_LLAMA3), "llama3", None),
    "gpt-oss": (_HARMONY, "harmony", "harmony"),
}  # fmt: skip
