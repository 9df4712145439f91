//! The two shapes in which OpenAI gives logprobs.
//!
//! They are written as JSON straight from the tokens: strings and maps for each
//! alternative, all at once, would take several times the memory of the answer.

use std::sync::Arc;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use tasuki_flow::TokenLogprob;
use tasuki_text::ModelText;

use super::choice::PlacedToken;

/// JSON has no minus infinity; this stands for it, as elsewhere.
const LEAST_LOGPROB: f32 = -9999.0;

/// `choices[].logprobs` of a chat: `content` with an object per token.
#[derive(Debug)]
pub struct ChatLogprobs {
    pub text: Arc<ModelText>,
    pub tokens: Vec<PlacedToken>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Serialize for ChatLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let alternative = |token: u32, logprob: f32| {
            let bytes = self.text.token_bytes(token);
            ChatAlternative {
                token: token_string(&bytes, ""),
                logprob: finite(logprob),
                bytes,
            }
        };
        let known = || self.tokens.iter().filter_map(|t| t.logprob.as_ref());
        let mut object = serializer.serialize_struct("ChatLogprobs", 1)?;
        let content = Column(|| {
            known().map(|logprob| ChatToken {
                token: alternative(logprob.token, logprob.logprob),
                top_logprobs: logprob
                    .top
                    .iter()
                    .map(|top| alternative(top.token, top.logprob))
                    .collect(),
            })
        });
        object.serialize_field("content", &content)?;
        object.end()
    }
}

/// `choices[].logprobs` of a completion: four columns with an item per token, those of
/// an echoed prompt first.
#[derive(Debug)]
pub struct CompletionLogprobs {
    pub text: Arc<ModelText>,
    pub tokens: Vec<PlacedToken>,
}

impl Serialize for CompletionLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let name = |token: u32| token_string(&self.text.token_bytes(token), "bytes:");
        let placed = || self.tokens.iter();
        let known = || placed().map(|placed| placed.logprob.as_ref());
        let own = |logprob: &TokenLogprob| finite(logprob.logprob);
        let mut object = serializer.serialize_struct("CompletionLogprobs", 4)?;
        object.serialize_field("tokens", &Column(|| placed().map(|t| name(t.token))))?;
        object.serialize_field("token_logprobs", &Column(|| known().map(|l| l.map(own))))?;
        let top = Column(|| known().map(|l| l.map(|l| alternatives(l, name))));
        object.serialize_field("top_logprobs", &top)?;
        object.serialize_field("text_offset", &Column(|| placed().map(|t| t.text_offset)))?;
        object.end()
    }
}

/// A list whose items are made while it is written.
struct Column<F>(F);

impl<F, I> Serialize for Column<F>
where
    F: Fn() -> I,
    I: Iterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// The most likely tokens, and the chosen one in any case. Of several with the same text (`a`
/// and the byte token of `a`) the likeliest counts.
fn alternatives(logprob: &TokenLogprob, name: impl Fn(u32) -> String) -> Map<String, Value> {
    let mut map = Map::new();
    let top = logprob.top.iter().map(|top| (top.token, top.logprob));
    for (token, value) in top.chain([(logprob.token, logprob.logprob)]) {
        map.entry(name(token))
            .or_insert_with(|| finite(value).into());
    }
    map
}

/// A number that JSON has.
pub fn finite(logprob: f32) -> f32 {
    // NaN compares false and becomes the least as well.
    if logprob > LEAST_LOGPROB {
        logprob
    } else {
        LEAST_LOGPROB
    }
}

/// A token's text; one that is no whole character is spelled byte by byte.
pub fn token_string(bytes: &[u8], prefix: &str) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let mut spelled = prefix.to_owned();
            for byte in bytes {
                spelled.push_str(&format!("\\x{byte:02x}"));
            }
            spelled
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestModel, logprob};
    use tasuki_flow::TopLogprob;

    fn placed(token: u32, text_offset: usize) -> PlacedToken {
        let mut logprob = logprob(token);
        logprob.top = vec![TopLogprob {
            token: u32::from(b'q'),
            logprob: f32::NEG_INFINITY,
        }];
        PlacedToken {
            token,
            logprob: Some(logprob),
            text_offset,
        }
    }

    #[test]
    fn a_broken_character_is_spelled_in_bytes() {
        assert_eq!(token_string("é".as_bytes(), "bytes:"), "é");
        assert_eq!(token_string(&[0xc3], "bytes:"), "bytes:\\xc3");
    }

    #[test]
    fn completion_has_columns_of_equal_length() {
        let model = TestModel::new();
        let mut first = placed(u32::from(b'a'), 0);
        first.logprob = None;
        let columns = CompletionLogprobs {
            text: Arc::clone(&model.text),
            tokens: vec![first, placed(u32::from(b'b'), 1)],
        };
        assert_eq!(
            serde_json::to_value(columns).unwrap(),
            serde_json::json!({
                "tokens": ["a", "b"],
                "token_logprobs": [null, -1.0],
                "top_logprobs": [null, {"q": -9999.0, "b": -1.0}],
                "text_offset": [0, 1],
            })
        );
    }

    #[test]
    fn of_tokens_with_the_same_text_the_likeliest_counts() {
        let mut found = placed(7, 0).logprob.unwrap();
        let top = |token, logprob| TopLogprob { token, logprob };
        found.top = vec![top(7, -1.0), top(8, -5.0)];
        let map = alternatives(&found, |_| "a".to_owned());
        assert_eq!(
            serde_json::to_value(map).unwrap(),
            serde_json::json!({"a": -1.0})
        );
    }

    #[test]
    fn chat_has_bytes_and_alternatives() {
        let model = TestModel::new();
        let logprobs = ChatLogprobs {
            text: Arc::clone(&model.text),
            tokens: vec![placed(u32::from(b'b'), 0)],
        };
        assert_eq!(
            serde_json::to_value(logprobs).unwrap(),
            serde_json::json!({"content": [{
                "token": "b", "logprob": -1.0, "bytes": [98],
                "top_logprobs": [{"token": "q", "logprob": -9999.0, "bytes": [113]}],
            }]})
        );
    }
}
