"""Chat templates render as transformers renders them, and fail as requests, not as crashes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import ChatTemplateError
from mie.text.chat import ChatTemplate
from mie.text.tokenizer import Tokenizer

# The kinds of templates that models come with, in their ways of writing; the texts are made up.
CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3_LIKE = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string + "\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not message.role in ['user', 'assistant'] %}
        {{- raise_exception("no role '" + message.role + "' here") }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN_LIKE = """\
{%- if tools %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is none %}{%- continue %}{%- endif %}
    {%- if loop.index0 > 6 %}{%- break %}{%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if loop.index0 == ns.last %}{{- ' last' }}{%- endif %}
    {%- generation %}
    {{- '\\n' + message | tojson(indent=2) + message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONTENT = st.text(max_size=12) | st.sampled_from(["<b>&\"'", "a</think>\n\nb", "{{ x }}", "é🙂"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENT}),
    min_size=1,
    max_size=9,
)
SYSTEM = st.lists(
    st.fixed_dictionaries({"role": st.just("system"), "content": CONTENT}), max_size=1
)


def render_by_transformers(source, messages, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
    )
    return rendered[0]


@given(system=SYSTEM, messages=MESSAGES, prompt=st.booleans())
@pytest.mark.parametrize(
    "source", [CHATML, LLAMA3_LIKE, QWEN_LIKE], ids=["chatml", "llama", "qwen"]
)
def test_renders_as_transformers_does(source, system, messages, prompt):
    ours = ChatTemplate(source, SPECIAL).render(system + messages, add_generation_prompt=prompt)
    assert ours == render_by_transformers(source, system + messages, prompt)


def test_the_real_template_renders_as_transformers_does(smollm2_path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path)
    ours = Tokenizer.load(smollm2_path)
    for messages in (
        [{"role": "user", "content": "What is  9 + 1?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🙂"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}] * 2,
    ):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.render_chat(messages) == text
        assert ours.encode_chat(messages) == list(ids)


def render(source, messages=({"role": "user", "content": "Hi"},)):
    return ChatTemplate(source, SPECIAL, name="tiny").render(messages)


def test_a_templates_own_refusal_is_the_message():
    with pytest.raises(ChatTemplateError, match="no role 'tool' here"):
        render(LLAMA3_LIKE, [{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[0].nothing.deeper }}", "nothing"),  # undefined
        ("{% for %}", "Expected"),  # not a template
        ("{{ 'a' + messages[0].missing }}", "missing"),
        ("{{ 1 // 0 }}", "division"),  # any exception inside it
    ],
)
def test_whatever_goes_wrong_inside_is_a_refused_request(source, said):
    with pytest.raises(ChatTemplateError, match=said) as error:
        render(source)
    assert error.value.http_status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_what_it_is_given(source):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError):
        render(source, messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_model_without_a_template_says_what_to_do():
    with pytest.raises(ChatTemplateError, match=re.escape("tiny has no chat template")) as error:
        render(None)
    assert "--raw" in str(error.value)
