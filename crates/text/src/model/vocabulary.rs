//! What each token id stands for, as bytes.
//!
//! Tokenizers write bytes in one of two alphabets: byte-level (GPT-2: every
//! byte is a printable character) or sentencepiece (`▁` for a space, `<0x0A>`
//! for a byte without a character of its own). The table is built once and
//! laid out in one piece of memory.

use serde_json::Value;
use tokenizers::Tokenizer;

/// How tokens become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// Bytes are joined, then read as UTF-8.
    ByteLevel,
    /// Characters are joined, runs of byte tokens are read as UTF-8; then at
    /// most `strip` leading `strip_char`s go.
    ByteFallback { strip_char: char, strip: usize },
    /// Anything else: asked of the tokenizers library, a few tokens at a time.
    Other,
}

/// The tokens of a vocabulary, by id.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    pub decoding: Decoding,
    bytes: Vec<u8>,
    /// `bytes[ends[id - 1]..ends[id]]` is token `id`.
    ends: Vec<u32>,
    flags: Vec<u8>,
}

const KNOWN: u8 = 1;
const SPECIAL: u8 = 2;
/// A byte token of the sentencepiece alphabet.
const BYTE: u8 = 4;

impl Vocabulary {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let decoder = tokenizer.get_decoder().map(serde_json::to_value);
        let (decoding, spaces) = decoding(decoder.and_then(Result::ok).as_ref());
        let vocabulary = tokenizer.get_vocab(true);
        let length = vocabulary.values().max().map_or(0, |id| *id as usize + 1);
        let added = tokenizer.get_added_vocabulary();
        let mut table = Self {
            decoding,
            bytes: Vec::with_capacity(length * 8),
            ends: Vec::with_capacity(length),
            flags: vec![0; length],
        };
        let alphabet = byte_level_alphabet();
        for id in 0..length {
            #[allow(clippy::cast_possible_truncation)]
            if let Some(token) = tokenizer.id_to_token(id as u32) {
                table.flags[id] = KNOWN;
                if added.is_special_token(&token) {
                    table.flags[id] |= SPECIAL;
                }
                table.push(id, &token, &alphabet, &spaces);
            }
            #[allow(clippy::cast_possible_truncation)]
            table.ends.push(table.bytes.len() as u32);
        }
        table
    }

    /// The number of ids, holes included.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes that a token stands for; none for an unknown id.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    pub fn is_known(&self, id: u32) -> bool {
        self.flag(id, KNOWN)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.flag(id, SPECIAL)
    }

    /// Whether the token is a byte of the sentencepiece alphabet.
    pub fn is_byte(&self, id: u32) -> bool {
        self.flag(id, BYTE)
    }

    fn flag(&self, id: u32, flag: u8) -> bool {
        self.flags.get(id as usize).is_some_and(|f| f & flag != 0)
    }

    fn push(&mut self, id: usize, token: &str, alphabet: &[Option<u8>], spaces: &[Replacement]) {
        match &self.decoding {
            Decoding::ByteLevel => {
                let bytes = token.chars().map(|c| *alphabet.get(c as usize)?);
                match bytes.collect::<Option<Vec<u8>>>() {
                    Some(bytes) => self.bytes.extend(bytes),
                    None => self.bytes.extend(token.as_bytes()),
                }
            }
            Decoding::ByteFallback { .. } | Decoding::Other => {
                let mut text = token.to_owned();
                for (from, to) in spaces {
                    text = text.replace(from.as_str(), to);
                }
                match byte_token(&text) {
                    Some(byte) if self.decoding != Decoding::Other => {
                        self.flags[id] |= BYTE;
                        self.bytes.push(byte);
                    }
                    _ => self.bytes.extend(text.as_bytes()),
                }
            }
        }
    }
}

type Replacement = (String, String);

/// Recognises the decoders whose effect can be written down per token.
fn decoding(decoder: Option<&Value>) -> (Decoding, Vec<Replacement>) {
    let other = (Decoding::Other, Vec::new());
    let Some(decoder) = decoder else {
        return other;
    };
    let kind = |value: &Value| value["type"].as_str().unwrap_or_default().to_owned();
    let mut steps = match decoder["decoders"].as_array() {
        Some(steps) if kind(decoder) == "Sequence" => steps.as_slice(),
        _ => std::slice::from_ref(decoder),
    };
    if let [only] = steps
        && kind(only) == "ByteLevel"
    {
        return (Decoding::ByteLevel, Vec::new());
    }
    if let [only] = steps
        && kind(only) == "Metaspace"
    {
        let space = only["replacement"].as_str().unwrap_or("▁").to_owned();
        return (Decoding::Other, vec![(space, " ".to_owned())]);
    }
    let mut spaces = Vec::new();
    while let [step, rest @ ..] = steps
        && kind(step) == "Replace"
        && let (Some(from), Some(to)) =
            (step["pattern"]["String"].as_str(), step["content"].as_str())
    {
        spaces.push((from.to_owned(), to.to_owned()));
        steps = rest;
    }
    let [bytes, fuse, strip @ ..] = steps else {
        return other;
    };
    if kind(bytes) != "ByteFallback" || kind(fuse) != "Fuse" {
        return other;
    }
    let (strip_char, strip) = match strip {
        [] => (' ', 0),
        [strip] if kind(strip) == "Strip" && strip["stop"] == 0 => {
            let content = strip["content"].as_str().and_then(|s| s.chars().next());
            #[allow(clippy::cast_possible_truncation)]
            match (content, strip["start"].as_u64()) {
                (Some(content), Some(start)) => (content, start as usize),
                _ => return other,
            }
        }
        _ => return other,
    };
    (Decoding::ByteFallback { strip_char, strip }, spaces)
}

/// `<0x0A>` is the byte 10.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// By character, the byte it stands for in the byte-level alphabet.
///
/// Printable Latin-1 characters stand for themselves; the other 68 bytes are
/// numbered from U+0100 on. Source: GPT-2's `bytes_to_unicode`.
fn byte_level_alphabet() -> Vec<Option<u8>> {
    let mut alphabet = vec![None; 0x100 + 68];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            alphabet[usize::from(byte)] = Some(byte);
        } else {
            alphabet[next] = Some(byte);
            next += 1;
        }
    }
    alphabet
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Decoding, byte_level_alphabet, byte_token, decoding};

    #[test]
    fn the_alphabet_names_every_byte_once() {
        let mut bytes: Vec<u8> = byte_level_alphabet().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert!(bytes.iter().copied().eq(0..=255));
        assert_eq!(byte_level_alphabet()['Ġ' as usize], Some(b' '));
        assert_eq!(byte_level_alphabet()['Ċ' as usize], Some(b'\n'));
    }

    #[test]
    fn byte_tokens_are_exactly_six_characters() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xA>"), None);
        assert_eq!(byte_token("<0xGG>"), None);
    }

    #[test]
    fn known_decoders_are_recognised_and_others_are_not() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]});
        let expected = Decoding::ByteFallback {
            strip_char: ' ',
            strip: 1,
        };
        assert_eq!(decoding(Some(&llama)).0, expected);
        assert_eq!(
            decoding(Some(&json!({"type": "ByteLevel"}))).0,
            Decoding::ByteLevel
        );
        let unfused = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]});
        assert_eq!(decoding(Some(&unfused)).0, Decoding::Other);
        assert_eq!(decoding(None).0, Decoding::Other);
    }
}
