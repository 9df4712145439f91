//! The items of a response's output, as they grow.
//!
//! Streamed or not, an answer is made of the same [`Change`]s.

use serde::{Serialize, Serializer};

use crate::openai::calls::{Call, Part};

/// Something that happened to the output. Numbers are of items.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    Begun(usize),
    /// By this text, or arguments.
    Grown(usize, String),
    Ended(usize),
}

/// One item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub id: String,
    pub status: Status,
    pub content: Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    InProgress,
    Completed,
    Incomplete,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Reasoning(String),
    Text(String),
    Call { call_id: String, call: Call },
}

/// All items. At most the last is in progress.
#[derive(Debug, Default)]
pub struct Items(Vec<Item>);

impl Items {
    pub fn all(&self) -> &[Item] {
        &self.0
    }

    /// Adds what the answer says. `call_id`: makes the id of a call.
    pub fn add(&mut self, part: Part, call_id: impl FnOnce() -> String) -> Vec<Change> {
        match part {
            Part::Reasoning(text) => self.grow(text, Content::Reasoning(String::new())),
            Part::Content(text) => self.grow(text, Content::Text(String::new())),
            Part::Call(_, call) => {
                let mut changes = self.end_last(Status::Completed);
                let arguments = call.arguments.clone();
                let at = self.begin(Content::Call {
                    call_id: call_id(),
                    call,
                });
                changes.extend([Change::Begun(at), Change::Grown(at, arguments)]);
                changes.extend(self.end_last(Status::Completed));
                changes
            }
        }
    }

    /// Ends the output. `is_cut`: the answer stopped for want of tokens. An answer without anything
    /// in it is an empty message.
    pub fn end(&mut self, is_cut: bool) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.0.is_empty() {
            changes = self.grow(String::new(), Content::Text(String::new()));
        }
        changes.extend(self.end_last(match is_cut {
            true => Status::Incomplete,
            false => Status::Completed,
        }));
        changes
    }

    /// Adds text to the last item if it is of the kind of `empty` and in progress, or else to a new
    /// one.
    fn grow(&mut self, text: String, empty: Content) -> Vec<Change> {
        let goes_on = self.0.last().is_some_and(|last| {
            last.status == Status::InProgress
                && std::mem::discriminant(&last.content) == std::mem::discriminant(&empty)
        });
        let mut changes = Vec::new();
        if !goes_on {
            changes = self.end_last(Status::Completed);
            changes.push(Change::Begun(self.begin(empty)));
        }
        if let Some(Content::Reasoning(all) | Content::Text(all)) =
            self.0.last_mut().map(|last| &mut last.content)
        {
            all.push_str(&text);
        }
        if !text.is_empty() {
            changes.push(Change::Grown(self.0.len() - 1, text));
        }
        changes
    }

    fn begin(&mut self, content: Content) -> usize {
        let prefix = match content {
            Content::Reasoning(_) => "rs",
            Content::Text(_) => "msg",
            Content::Call { .. } => "fc",
        };
        self.0.push(Item {
            id: format!("{prefix}_{:032x}", rand::random::<u128>()),
            status: Status::InProgress,
            content,
        });
        self.0.len() - 1
    }

    fn end_last(&mut self, status: Status) -> Vec<Change> {
        let at = self.0.len().saturating_sub(1);
        let last = self.0.last_mut();
        let last = last.filter(|last| last.status == Status::InProgress);
        let ended = last.map(|last| last.status = status);
        Vec::from_iter(ended.map(|()| Change::Ended(at)))
    }
}

impl Item {
    /// As it began: without its content.
    pub fn begun(&self) -> impl Serialize + use<'_> {
        self.shown(Status::InProgress, Vec::new(), "")
    }

    /// The part of an item of text; `None` for calls. `text`: what it has.
    pub fn part<'a>(&self, text: &'a str) -> Option<ContentPart<'a>> {
        match &self.content {
            Content::Reasoning(_) => Some(ContentPart::ReasoningText { text }),
            Content::Text(_) => Some(ContentPart::OutputText {
                text,
                annotations: [],
                logprobs: [],
            }),
            Content::Call { .. } => None,
        }
    }

    /// All of the text, or of the arguments.
    pub fn text(&self) -> &str {
        match &self.content {
            Content::Reasoning(text) | Content::Text(text) => text,
            Content::Call { call, .. } => &call.arguments,
        }
    }

    fn shown<'a>(
        &'a self,
        status: Status,
        content: Vec<ContentPart<'a>>,
        arguments: &'a str,
    ) -> Shown<'a> {
        let id = &self.id;
        match &self.content {
            Content::Reasoning(_) => Shown::Reasoning {
                id,
                summary: [],
                content,
                status,
            },
            Content::Text(_) => Shown::Message {
                id,
                role: "assistant",
                content,
                status,
            },
            Content::Call { call_id, call } => Shown::FunctionCall {
                id,
                call_id,
                name: &call.name,
                arguments,
                status,
            },
        }
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.text();
        let content = Vec::from_iter(self.part(text));
        self.shown(self.status, content, text).serialize(serializer)
    }
}

/// Nothing of a kind, as a list.
type Nothing = [(); 0];

/// An item as clients see it.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Shown<'a> {
    Reasoning {
        id: &'a str,
        summary: Nothing,
        content: Vec<ContentPart<'a>>,
        status: Status,
    },
    Message {
        id: &'a str,
        role: &'static str,
        content: Vec<ContentPart<'a>>,
        status: Status,
    },
    FunctionCall {
        id: &'a str,
        call_id: &'a str,
        name: &'a str,
        arguments: &'a str,
        status: Status,
    },
}

/// A part of an item's content.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart<'a> {
    ReasoningText {
        text: &'a str,
    },
    OutputText {
        text: &'a str,
        annotations: Nothing,
        logprobs: Nothing,
    },
}
