//! The typed events of a stream.

use serde::Serialize;

use super::items::{Change, Content, Item};
use super::object::{ResponseError, ResponseObject};
use crate::openai::answer::wording::Events;

/// Numbers the events of one stream.
#[derive(Debug, Default)]
pub struct Numbering {
    next: u64,
}

#[derive(Serialize)]
struct Numbered<'a, T> {
    #[serde(rename = "type")]
    kind: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    content: T,
}

#[derive(Serialize)]
struct OfResponse<'a> {
    response: &'a ResponseObject<'a>,
}

#[derive(Serialize)]
struct OfItem<T> {
    output_index: usize,
    item: T,
}

/// Events of what an item has. Parts are the first of their item.
#[derive(Serialize)]
struct OfContent<'a, T> {
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    #[serde(flatten)]
    content: T,
}

#[derive(Serialize)]
struct Part<T> {
    part: T,
}

#[derive(Serialize)]
struct Delta<'a> {
    delta: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
struct Text<'a> {
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

#[derive(Serialize)]
struct Arguments<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl Numbering {
    /// An event with the whole response.
    pub fn response(&mut self, kind: &str, response: &ResponseObject<'_>, events: &mut Events) {
        self.write(kind, OfResponse { response }, events);
    }

    /// What ends a stream that failed before its first event.
    pub fn error(&mut self, error: &ResponseError, events: &mut Events) {
        #[derive(Serialize)]
        struct Shown<'a> {
            code: &'a str,
            message: &'a str,
            param: Option<&'a str>,
        }
        let shown = Shown {
            code: error.code,
            message: &error.message,
            param: error.param.as_deref(),
        };
        self.write("error", shown, events);
    }

    /// The events of a change to one of the items.
    pub fn change(&mut self, change: &Change, items: &[Item], events: &mut Events) {
        match change {
            Change::Begun(at) => self.begun(*at, &items[*at], events),
            Change::Grown(at, text) => self.grown(*at, &items[*at], text, events),
            Change::Ended(at) => self.ended(*at, &items[*at], events),
        }
    }

    fn begun(&mut self, at: usize, item: &Item, events: &mut Events) {
        let begun = OfItem {
            output_index: at,
            item: item.begun(),
        };
        self.write("response.output_item.added", begun, events);
        if let Some(part) = item.part("") {
            let part = of_content(at, item, Part { part });
            self.write("response.content_part.added", part, events);
        }
    }

    fn grown(&mut self, at: usize, item: &Item, text: &str, events: &mut Events) {
        let (kind, logprobs) = match item.content {
            Content::Reasoning(_) => ("response.reasoning_text.delta", None),
            Content::Text(_) => ("response.output_text.delta", Some([])),
            Content::Call { .. } => ("response.function_call_arguments.delta", None),
        };
        let delta = Delta {
            delta: text,
            logprobs,
        };
        self.write(kind, of_content(at, item, delta), events);
    }

    fn ended(&mut self, at: usize, item: &Item, events: &mut Events) {
        let text = item.text();
        let text_done = |logprobs| of_content(at, item, Text { text, logprobs });
        match &item.content {
            Content::Reasoning(_) => {
                self.write("response.reasoning_text.done", text_done(None), events);
            }
            Content::Text(_) => {
                self.write("response.output_text.done", text_done(Some([])), events);
            }
            Content::Call { call, .. } => {
                let arguments = Arguments {
                    name: &call.name,
                    arguments: &call.arguments,
                };
                let arguments = of_content(at, item, arguments);
                self.write("response.function_call_arguments.done", arguments, events);
            }
        }
        if let Some(part) = item.part(text) {
            let part = of_content(at, item, Part { part });
            self.write("response.content_part.done", part, events);
        }
        let ended = OfItem {
            output_index: at,
            item,
        };
        self.write("response.output_item.done", ended, events);
    }

    fn write(&mut self, kind: &str, content: impl Serialize, events: &mut Events) {
        let numbered = Numbered {
            kind,
            sequence_number: self.next,
            content,
        };
        self.next += 1;
        events.named(kind, &numbered);
    }
}

fn of_content<T>(at: usize, item: &Item, content: T) -> OfContent<'_, T> {
    OfContent {
        item_id: &item.id,
        output_index: at,
        content_index: match item.content {
            Content::Call { .. } => None,
            Content::Reasoning(_) | Content::Text(_) => Some(0),
        },
        content,
    }
}
