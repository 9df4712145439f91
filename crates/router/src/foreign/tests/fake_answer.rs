//! Answers in the forms of the three paths.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::fake::truth;

/// How an answer is written.
pub struct Shape {
    pub chat: bool,
    pub native: bool,
    pub id: String,
    pub prompt_tokens: usize,
}

impl Shape {
    pub fn opening(&self) -> Vec<String> {
        let role = json!({"index": 0, "delta": {"role": "assistant", "content": ""},
            "finish_reason": null});
        match self.chat {
            true => vec![self.event(&json!([role]))],
            false => Vec::new(),
        }
    }

    pub fn chunk(&self, position: usize, last: bool, padding: &str) -> String {
        let finish = if last { json!("stop") } else { Value::Null };
        let text = truth(position) + padding;
        if self.native {
            let meta = json!({"id": self.id, "input_token_logprobs": [[-1.0, 9, null]]});
            return format!("data: {}\n\n", json!({"text": text, "meta_info": meta}));
        }
        let choice = match self.chat {
            true => json!({"index": 0, "delta": {"content": text}, "finish_reason": finish}),
            false => json!({"index": 0, "text": text, "finish_reason": finish}),
        };
        self.event(&json!([choice]))
    }

    /// Of an answer that breaks off.
    pub fn error(&self, code: u16) -> Value {
        if self.native {
            let reason = json!({"type": "abort", "message": "planted", "status_code": code});
            return json!({"text": "", "meta_info": {"id": self.id, "finish_reason": reason}});
        }
        match self.chat {
            true => json!({"error": {"message": "planted", "code": code}}),
            // As older versions of vLLM have it.
            false => json!({"object": "error", "message": "planted", "code": code}),
        }
    }

    pub fn usage(&self, tokens: usize) -> String {
        let usage = self.counts(tokens);
        let chunk = json!({"id": self.id, "created": 5, "choices": [], "usage": usage});
        format!("data: {chunk}\n\n")
    }

    pub fn event(&self, choices: &Value) -> String {
        // Spaces where none are needed: nobody is to write it anew.
        let id = &self.id;
        format!("data: {{\"id\": \"{id}\", \"created\": 5, \"choices\": {choices}}}\n\n")
    }

    pub fn whole(&self, start: usize, tokens: usize) -> Response {
        let text: String = (start..start + tokens).map(truth).collect();
        let body = if self.native {
            let meta = json!({"id": self.id, "input_token_logprobs": [[-1.0, 9, null]]});
            json!({"text": text, "meta_info": meta})
        } else {
            let choice = match self.chat {
                true => json!({"message": {"content": text}, "finish_reason": "stop"}),
                false => json!({"text": text, "finish_reason": "stop"}),
            };
            json!({"id": self.id, "choices": [choice], "usage": self.counts(tokens)})
        };
        let kind = [(header::CONTENT_TYPE, "application/json; x=1")];
        (kind, body.to_string()).into_response()
    }

    pub fn counts(&self, tokens: usize) -> Value {
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens})
    }
}
