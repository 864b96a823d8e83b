"""A small tokenizer for a tiny policy: every word it needs is one token, everything else is bytes.

A byte-level BPE without merges: a piece of text that is a listed word is one token, any other falls to its bytes, so every
text round-trips. Special tokens, turns and chat template are Qwen3's: what renders Qwen3 renders this one.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""As with Qwen3, markup is one token each but no special token: it stays when special tokens are skipped."""

ROLES = ("system\n", "user\n", "assistant\n")
PIECES = Regex(r"(?:system|user|assistant)\n| ?\w+| ?[^\s\w]+|\s")
"""A role with its line break; a word or a run of punctuation, with a space before it; one blank. They cover any text."""

CHAT_TEMPLATE = """\
{%- if tools %}{{ raise_exception('This chat template has no tools.') }}{% endif %}
{%- set ns = namespace(query=messages|length - 1) %}
{%- for message in messages %}
    {%- set content = (message.content or '').strip() %}
    {%- set reply = content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not reply %}{% set ns.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>', 1)[1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.query and (loop.last or reasoning) %}
            {%- set content = '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') %}
        {%- endif %}
    {%- elif message.role not in ('system', 'user') %}
        {{- raise_exception('This chat template has no role ' + message.role + '.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""What Qwen3's template makes of system, user and assistant turns: thinking is kept after the last user turn only."""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer in which every word of `texts` is one token, with or without a space before it.

    Words are runs of letters, digits and underscores, or of punctuation. The vocabulary is the 256 bytes, the words twice,
    in order of appearance, three roles and nine special tokens. Save it with `save_pretrained`, load it with AutoTokenizer.
    """
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    space = splitter.pre_tokenize_str(" ")[0][0]
    entries = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    entries |= dict.fromkeys(piece for role in ROLES for piece, _ in splitter.pre_tokenize_str(role))
    for text in texts:
        for piece, _ in splitter.pre_tokenize_str(text):
            word = piece.removeprefix(space)
            entries |= {word: None, space + word: None} if word else {}
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
