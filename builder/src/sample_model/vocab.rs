//! The sample models' vocabulary: 256 byte tokens, 400 invented words, four control tokens, and the
//! marks around a tool call where a model needs them.
//!
//! The vocabulary is byte-level BPE. The pre-tokenizer `llama-bpe` looks up a whole word (with the space
//! before it) before it tries merges, so no merge list is needed, and text of these words tokenizes back to
//! its tokens. Any other text is split into byte tokens, so any input is valid.

use crate::gguf::{GgufWriter, MetadataValue};

pub(crate) const WORD_COUNT: usize = 400;
/// Id of the first word; the byte tokens come first, in the order of their bytes.
pub(crate) const FIRST_WORD_ID: usize = 256;
/// Id of the token that ends a turn, and thereby the answer.
pub(crate) const TURN_END_ID: usize = FIRST_WORD_ID + WORD_COUNT + 2;
pub(crate) const TOKEN_COUNT: usize = FIRST_WORD_ID + WORD_COUNT + CONTROL_TOKENS.len();

/// Control tokens: start of text, start of a turn, end of a turn, padding.
const CONTROL_TOKENS: [&str; 4] = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];
/// Marks around a tool call, in models with tools; their ids follow the control tokens.
const TOOL_CALL_MARKS: [&str; 2] = ["<tool_call>", "</tool_call>"];
pub(crate) const TOOL_CALL_ID: usize = TOKEN_COUNT;
pub(crate) const TOOLS_TOKEN_COUNT: usize = TOKEN_COUNT + TOOL_CALL_MARKS.len();
pub(crate) const NEWLINE_ID: usize = b'\n' as usize;
const NORMAL_TYPE: i32 = 1;
const CONTROL_TYPE: i32 = 3;
const USER_DEFINED_TYPE: i32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VocabKind {
    Text,
    Turns,
    Tools,
}

/// Syllables of the invented words. A word has two or three; none is an English word.
const SYLLABLES: [&str; 16] =
    ["ba", "do", "ki", "lu", "me", "no", "pi", "ra", "su", "te", "vo", "wa", "ze", "fi", "gu", "ja"];

/// Newlines are inside expressions, because the template language strips newlines next to its tags.
const CHAT_TEMPLATE: &str = "\
{%- for message in messages -%}\
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}\
{%- if message.content is string -%}{{- message.content -}}\
{%- else -%}{%- for part in message.content or [] -%}\
{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}\
{%- endif -%}\
{{- '<|im_end|>\\n' -}}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// Like [`CHAT_TEMPLATE`], with tools before the first turn; calls and results in the `<tool_call>` format.
const TOOLS_TEMPLATE: &str = "\
{%- if tools -%}\
{{- '<|im_start|>system\\n# Tools\\n' -}}\
{%- for tool in tools -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}\
{{- 'To call one: <tool_call>\\n{\"name\": <name>, \"arguments\": <arguments>}\\n</tool_call><|im_end|>\\n' -}}\
{%- endif -%}\
{%- for message in messages -%}\
{%- if message.role == 'tool' -%}\
{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' -}}\
{%- else -%}\
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}\
{%- if message.content is string -%}{{- message.content -}}\
{%- else -%}{%- for part in message.content or [] -%}\
{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}\
{%- endif -%}\
{%- for call in message.tool_calls or [] -%}\
{{- '\\n<tool_call>\\n{\"name\": \"' ~ call.function.name ~ '\", \"arguments\": ' ~ \
(call.function.arguments | tojson) ~ '}\\n</tool_call>' -}}\
{%- endfor -%}\
{{- '<|im_end|>\\n' -}}\
{%- endif -%}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// Adds the tokenizer's metadata. Token ids: bytes, then words, then control tokens, then marks.
pub(crate) fn add_vocab(file: &mut GgufWriter, speaks: VocabKind) {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|byte| symbol(byte).to_string()).collect();
    let space = symbol(b' ');
    tokens.extend((0..WORD_COUNT).map(|index| format!("{space}{}", word(index))));
    let mut types = vec![NORMAL_TYPE; tokens.len()];
    tokens.extend(CONTROL_TOKENS.map(str::to_owned));
    types.resize(tokens.len(), CONTROL_TYPE);
    if speaks == VocabKind::Tools {
        tokens.extend(TOOL_CALL_MARKS.map(str::to_owned));
        types.resize(tokens.len(), USER_DEFINED_TYPE);
    }

    let id = |place: usize| {
        MetadataValue::U32(u32::try_from(FIRST_WORD_ID + WORD_COUNT + place).unwrap_or(u32::MAX))
    };
    file.set("tokenizer.ggml.model", MetadataValue::String("gpt2".to_owned()))
        .set("tokenizer.ggml.pre", MetadataValue::String("llama-bpe".to_owned()))
        .set("tokenizer.ggml.tokens", MetadataValue::Strings(tokens))
        .set("tokenizer.ggml.token_type", MetadataValue::I32s(types))
        // llama.cpp demands a merge list; this merge yields no token of the vocabulary, so it never applies.
        .set("tokenizer.ggml.merges", MetadataValue::Strings(vec![format!("{space} b")]))
        .set("tokenizer.ggml.bos_token_id", id(0))
        .set("tokenizer.ggml.eos_token_id", id(2))
        .set("tokenizer.ggml.padding_token_id", id(3))
        .set("tokenizer.ggml.add_bos_token", MetadataValue::Bool(true))
        .set("tokenizer.ggml.add_eos_token", MetadataValue::Bool(false));
    let template = match speaks {
        VocabKind::Text => return,
        VocabKind::Turns => CHAT_TEMPLATE,
        VocabKind::Tools => TOOLS_TEMPLATE,
    };
    file.set("tokenizer.chat_template", MetadataValue::String(template.to_owned()));
}

/// The printable character for a raw byte: printable Latin-1 maps to itself, other bytes to U+0100 and up.
fn symbol(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        char::from(byte)
    } else {
        let place = (0..byte).filter(|other| !printable(*other)).count();
        u32::try_from(place)
            .ok()
            .and_then(|place| char::from_u32(0x100 + place))
            .unwrap_or(char::REPLACEMENT_CHARACTER)
    }
}

/// Returns the invented word of an index: two syllables for the first 256 words, then three.
fn word(index: usize) -> String {
    let syllables = if index < 256 { 2 } else { 3 };
    (0..syllables).map(|place| SYLLABLES[(index >> (4 * place)) % 16]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_token_is_different() {
        let mut all: BTreeSet<String> = (0..=u8::MAX).map(|byte| symbol(byte).to_string()).collect();
        all.extend((0..WORD_COUNT).map(word));
        assert_eq!(all.len(), 256 + WORD_COUNT);
    }

    #[test]
    fn bytes_have_their_usual_stand_ins() {
        assert_eq!(
            [symbol(b'a'), symbol(b' '), symbol(b'\n'), symbol(0), symbol(0xad)],
            ['a', 'Ġ', 'Ċ', 'Ā', 'Ń']
        );
    }

    #[test]
    fn a_word_cannot_be_the_beginning_of_two_others_by_accident() {
        // A longer word may begin with a shorter one, but the space before each word separates them.
        assert!((0..256).all(|index| word(index).len() == 4));
        assert!((256..WORD_COUNT).all(|index| word(index).len() == 6));
    }
}
