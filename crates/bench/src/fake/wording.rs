//! The JSON of a fake server's chunks, worded for one request.

use bytes::Bytes;
use serde_json::{Value, json};

use super::script::{Asked, Step};

/// Words the chunks of one answer, and counts its tokens.
#[derive(Debug, Clone)]
pub struct Wording {
    asked: Asked,
    tokens: u32,
}

impl Wording {
    pub fn new(asked: &Asked) -> Self {
        Self {
            asked: asked.clone(),
            tokens: 0,
        }
    }

    /// A chunk of `text`, which is `tokens` tokens.
    pub fn chunk(&mut self, text: &str, tokens: u32) -> Step {
        self.tokens += tokens;
        self.choice(text, None)
    }

    /// The chunk with the finish reason and no text.
    pub fn finish(&self) -> Step {
        self.choice("", Some("length"))
    }

    /// The chunk with the usage alone; sends nothing if it was not asked for.
    pub fn usage(&self) -> Option<Step> {
        let chunk = json!({"id": "fake", "object": self.object(), "created": 0, "model": "fake",
                           "choices": [], "usage": self.usage_json()});
        self.asked.include_usage.then(|| event(&chunk.to_string()))
    }

    /// The end of the stream.
    pub fn done() -> Step {
        event("[DONE]")
    }

    /// An error in the middle of the stream.
    pub fn error(message: &str) -> Step {
        event(&json!({"error": {"message": message, "code": 500}}).to_string())
    }

    /// The whole answer at once, for requests that are not streamed.
    pub fn whole(&self, text: &str) -> Value {
        let choice = if self.asked.chat {
            json!({"index": 0, "message": {"role": "assistant", "content": text},
                   "finish_reason": "length"})
        } else {
            json!({"index": 0, "text": text, "finish_reason": "length"})
        };
        json!({"id": "fake", "object": self.object().trim_end_matches(".chunk"), "created": 0,
               "model": "fake", "choices": [choice], "usage": self.usage_json()})
    }

    fn object(&self) -> &'static str {
        if self.asked.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        }
    }

    /// By hand, for a server that streams as fast as it can must be light.
    fn choice(&self, text: &str, finish: Option<&str>) -> Step {
        let text = Value::from(text);
        let finish = finish.map_or("null".to_owned(), |finish| format!("\"{finish}\""));
        let content = if self.asked.chat {
            format!("\"delta\":{{\"content\":{text}}}")
        } else {
            format!("\"text\":{text}")
        };
        let usage = match (self.asked.continuous_usage, self.asked.include_usage) {
            (true, _) => format!(
                ",\"usage\":{{\"prompt_tokens\":{},\"completion_tokens\":{},\"total_tokens\":{}}}",
                self.asked.prompt_tokens,
                self.tokens,
                self.asked.prompt_tokens + self.tokens
            ),
            (false, true) => ",\"usage\":null".to_owned(),
            (false, false) => String::new(),
        };
        event(&format!(
            "{{\"id\":\"fake\",\"object\":\"{}\",\"created\":0,\"model\":\"fake\",\"choices\":[{{\
             \"index\":0,{content},\"logprobs\":null,\"finish_reason\":{finish}}}]{usage}}}",
            self.object(),
        ))
    }

    fn usage_json(&self) -> Value {
        json!({"prompt_tokens": self.asked.prompt_tokens, "completion_tokens": self.tokens,
               "total_tokens": self.asked.prompt_tokens + self.tokens})
    }
}

fn event(data: &str) -> Step {
    Step::Send(Bytes::from(format!("data: {data}\n\n")))
}
