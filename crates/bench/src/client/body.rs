//! The JSON of a request.

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::plan::{Api, Planned, Prompt};

/// How often the server is asked to count tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum UsageStats {
    /// With every chunk (`continuous_usage_stats`), and at the end.
    Chunks,
    /// At the end (`include_usage`).
    Final,
    /// Not at all: for servers that refuse `stream_options`.
    None,
}

/// What all requests of a run have in common.
#[derive(Debug, Clone)]
pub struct RequestOptions {
    pub api: Api,
    pub model: String,
    pub usage: UsageStats,
    pub temperature: Option<f64>,
    /// Further fields, which win over ours.
    pub extra: Map<String, Value>,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<Given<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<Message<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Given<'a> {
    Text(&'a str),
    Tokens(&'a [u32]),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continuous_usage_stats: bool,
}

/// The request body of `planned`.
pub fn body(options: &RequestOptions, planned: &Planned) -> Bytes {
    let chat = options.api == Api::Chat;
    let exact = planned.exact_output;
    let (prompt, messages) = match &planned.prompt {
        Prompt::Text(text) if chat => (None, Some(vec![user(text)])),
        Prompt::Text(text) => (Some(Given::Text(text)), None),
        Prompt::Tokens(tokens) => (Some(Given::Tokens(tokens)), None),
        Prompt::Messages(messages) => {
            let messages = messages.iter();
            let messages = messages.map(|(role, content)| Message { role, content });
            (None, Some(messages.collect()))
        }
        Prompt::Segments(_) => unreachable!("requests without content are not sent"),
    };
    let body = Body {
        model: &options.model,
        prompt,
        messages,
        max_tokens: (!chat).then_some(planned.output_tokens),
        max_completion_tokens: chat.then_some(planned.output_tokens),
        min_tokens: exact.then_some(planned.output_tokens),
        ignore_eos: exact.then_some(true),
        temperature: options.temperature,
        stream: true,
        stream_options: (options.usage != UsageStats::None).then_some(StreamOptions {
            include_usage: true,
            continuous_usage_stats: options.usage == UsageStats::Chunks,
        }),
    };
    let bytes = if options.extra.is_empty() {
        serde_json::to_vec(&body)
    } else {
        serde_json::to_value(&body).and_then(|mut value| {
            let fields = value.as_object_mut().expect("a struct is an object");
            fields.extend(options.extra.clone());
            serde_json::to_vec(&value)
        })
    };
    bytes
        .expect("strings and numbers can be written as JSON")
        .into()
}

fn user(content: &str) -> Message<'_> {
    Message {
        role: "user",
        content,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sent(options: &RequestOptions, prompt: Prompt, exact_output: bool) -> Value {
        let planned = Planned {
            index: 0,
            prompt,
            input_tokens: None,
            output_tokens: 7,
            exact_output,
            at: None,
        };
        serde_json::from_slice(&body(options, &planned)).unwrap()
    }

    fn options(api: Api, usage: UsageStats) -> RequestOptions {
        RequestOptions {
            api,
            model: "m".to_owned(),
            usage,
            temperature: None,
            extra: Map::new(),
        }
    }

    #[test]
    fn a_completion_of_exact_length() {
        let options = options(Api::Completions, UsageStats::Chunks);
        assert_eq!(
            sent(&options, Prompt::Tokens(vec![1, 2]), true),
            json!({"model": "m", "prompt": [1, 2], "max_tokens": 7, "min_tokens": 7,
                   "ignore_eos": true, "stream": true,
                   "stream_options": {"include_usage": true, "continuous_usage_stats": true}})
        );
    }

    #[test]
    fn a_chat_that_ends_by_itself() {
        let mut options = options(Api::Chat, UsageStats::None);
        options.extra.insert("top_p".to_owned(), json!(0.5));
        let messages = vec![("system".to_owned(), "be brief".to_owned())];
        assert_eq!(
            sent(&options, Prompt::Messages(messages), false),
            json!({"model": "m", "messages": [{"role": "system", "content": "be brief"}],
                   "max_completion_tokens": 7, "stream": true, "top_p": 0.5})
        );
        let text = sent(&options, Prompt::Text("hi".to_owned()), false);
        assert_eq!(text["messages"], json!([{"role": "user", "content": "hi"}]));
    }
}
