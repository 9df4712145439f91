//! The two shapes in which OpenAI gives logprobs.

use serde::Serialize;
use serde_json::{Map, Value};
use tasuki_text::ModelText;
use tasuki_wire::v1::TokenLogprob;

use super::choice::PlacedToken;

/// JSON has no minus infinity; this stands for it, as elsewhere.
const LEAST_LOGPROB: f32 = -9999.0;

/// `choices[].logprobs` of a chat.
#[derive(Debug, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatToken>,
}

#[derive(Debug, Serialize)]
pub struct ChatToken {
    #[serde(flatten)]
    pub token: ChatAlternative,
    pub top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
pub struct ChatAlternative {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

/// `choices[].logprobs` of a completion.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    pub text_offset: Vec<usize>,
}

/// Of tokens that all have a logprob.
pub fn chat_logprobs(text: &ModelText, tokens: &[PlacedToken]) -> ChatLogprobs {
    let alternative = |token: u32, logprob: f32| {
        let bytes = text.token_bytes(token);
        ChatAlternative {
            token: token_string(&bytes, ""),
            logprob: finite(logprob),
            bytes,
        }
    };
    let content = tokens
        .iter()
        .filter_map(|placed| placed.logprob.as_ref())
        .map(|logprob| ChatToken {
            token: alternative(logprob.token, logprob.logprob),
            top_logprobs: logprob
                .top
                .iter()
                .map(|top| alternative(top.token, top.logprob))
                .collect(),
        })
        .collect();
    ChatLogprobs { content }
}

/// Of the output's tokens, and of the prompt's if they were echoed.
pub fn completion_logprobs(text: &ModelText, tokens: &[PlacedToken]) -> CompletionLogprobs {
    let name = |token: u32| token_string(&text.token_bytes(token), "bytes:");
    let mut columns = CompletionLogprobs::default();
    for placed in tokens {
        columns.tokens.push(name(placed.token));
        columns.text_offset.push(placed.text_offset);
        let logprob = placed.logprob.as_ref();
        columns
            .token_logprobs
            .push(logprob.map(|logprob| finite(logprob.logprob)));
        columns
            .top_logprobs
            .push(logprob.map(|logprob| alternatives(logprob, name)));
    }
    columns
}

/// The most likely tokens, and the chosen one in any case.
fn alternatives(logprob: &TokenLogprob, name: impl Fn(u32) -> String) -> Map<String, Value> {
    let mut map: Map<String, Value> = logprob
        .top
        .iter()
        .map(|top| (name(top.token), finite(top.logprob).into()))
        .collect();
    map.entry(name(logprob.token))
        .or_insert_with(|| finite(logprob.logprob).into());
    map
}

fn finite(logprob: f32) -> f32 {
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
    use tasuki_wire::v1::TopLogprob;

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
        let columns = completion_logprobs(&model.text, &[first, placed(u32::from(b'b'), 1)]);
        assert_eq!(columns.tokens, ["a", "b"]);
        assert_eq!(columns.text_offset, [0, 1]);
        assert_eq!(columns.token_logprobs, [None, Some(-1.0)]);
        let top = columns.top_logprobs[1].as_ref().unwrap();
        assert_eq!(top["q"], -9999.0);
        assert_eq!(top["b"], -1.0);
        assert!(columns.top_logprobs[0].is_none());
    }

    #[test]
    fn chat_has_bytes_and_alternatives() {
        let model = TestModel::new();
        let logprobs = chat_logprobs(&model.text, &[placed(u32::from(b'b'), 0)]);
        assert_eq!(
            serde_json::to_value(logprobs).unwrap(),
            serde_json::json!({"content": [{
                "token": "b", "logprob": -1.0, "bytes": [98],
                "top_logprobs": [{"token": "q", "logprob": -9999.0, "bytes": [113]}],
            }]})
        );
    }
}
