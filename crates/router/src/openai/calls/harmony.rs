//! Answers in the harmony format of gpt-oss: messages, each of a channel.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! ```
//!
//! A message of the channel `analysis` is reasoning, one to a function is a call, others are
//! content; those of one kind have a blank line between them. What is no message, or a call whose
//! arguments are no object, is content as it was written. However the text is cut, the same parts
//! come out.

use serde_json::value::RawValue;

use super::format::Call;
use super::scanner::Part;

pub const START: &str = "<|start|>";
pub const CHANNEL: &str = "<|channel|>";
pub const MESSAGE: &str = "<|message|>";
pub const CONSTRAIN: &str = "<|constrain|>";
pub const END: &str = "<|end|>";

/// What ends a message. The last two also end an answer, and are not in its text then.
const CLOSE: [&str; 3] = [END, "<|call|>", "<|return|>"];
/// What begins the next one where its end was left out.
const OPEN: [&str; 2] = [START, CHANNEL];
/// What a message begins with, behind the prompt's `<|start|>assistant` too.
const BEGINNINGS: [&str; 4] = [START, CHANNEL, MESSAGE, TO];
const TO: &str = " to=";
const OF_FUNCTIONS: &str = "functions.";

/// Tokens of the format, which tokenizers declare as special.
pub const SPECIAL: [&str; 7] = [
    START,
    CHANNEL,
    MESSAGE,
    CONSTRAIN,
    END,
    "<|call|>",
    "<|return|>",
];

/// A longer header begins no message.
const MAX_HEADER_BYTES: usize = 256;

/// What is told from content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Harmony {
    pub calls: bool,
    pub reasoning: bool,
}

/// Reads one answer.
#[derive(Debug, Clone)]
pub struct Channels {
    looked_for: Harmony,
    state: State,
    /// What is not given out, from `start` on. In a header or a call: from its beginning.
    text: String,
    start: usize,
    /// Content, reasoning: an earlier message had some.
    said: [bool; 2],
    /// The current message has given nothing.
    is_new: bool,
    parts: Vec<Part>,
    calls: usize,
}

#[derive(Debug, Clone)]
enum State {
    Header,
    Text(Kind),
    /// `body`: where the arguments begin. `at`: it was looked at up to here.
    Call {
        name: String,
        body: usize,
        at: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
}

/// Whose text a message is.
enum Addressee {
    Client(Kind),
    Function(String),
    Unknown,
}

impl Channels {
    pub fn new(looked_for: Harmony) -> Self {
        Self {
            looked_for,
            state: State::Header,
            text: String::new(),
            start: 0,
            said: [false; 2],
            is_new: true,
            parts: Vec::new(),
            calls: 0,
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes the next text; returns what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.text.push_str(text);
        self.run(false);
        std::mem::take(&mut self.parts)
    }

    /// Ends the answer; returns what was still held back.
    pub fn finish(&mut self) -> Vec<Part> {
        self.run(true);
        std::mem::take(&mut self.parts)
    }

    fn run(&mut self, end: bool) {
        while self.start < self.text.len()
            && match std::mem::replace(&mut self.state, State::Header) {
                State::Header => self.header(end),
                State::Text(kind) => self.message(kind, end),
                State::Call { name, body, at } => self.call(name, body, at, end),
            }
        {}
        self.text.drain(..self.start);
        self.start = 0;
    }

    // Each state takes what it can from the text. True: the next state goes on with the rest.

    fn header(&mut self, end: bool) -> bool {
        self.is_new = true;
        let text = &self.text[self.start..];
        let Some(beginning) = BEGINNINGS.iter().find(|mark| text.starts_with(**mark)) else {
            let may_begin = BEGINNINGS.iter().any(|mark| mark.starts_with(text));
            self.state = match may_begin && !end {
                true => State::Header,
                false => State::Text(Kind::Content),
            };
            return !may_begin || end;
        };
        let most = MAX_HEADER_BYTES + MESSAGE.len();
        let head = &text.as_bytes()[..text.len().min(most)];
        #[cfg(test)]
        super::tests::looked_at(head.len());
        let found = head
            .windows(MESSAGE.len())
            .position(|here| here == MESSAGE.as_bytes());
        let is_header = |byte: &u8| !matches!(byte, b'\n' | b'{');
        let found = found.filter(|at| head[..*at].iter().all(is_header));
        if found.is_none() && !end && head.len() < most && head.iter().all(is_header) {
            return false;
        }
        if found.is_none() && end && head.len() < most && !text.contains(TO) {
            // Nothing of the message is there.
            self.start = self.text.len();
            return false;
        }
        let Some(at) = found else {
            self.give_bytes(Kind::Content, beginning.len());
            self.state = State::Text(Kind::Content);
            return true;
        };
        let body = at + MESSAGE.len();
        self.state = match self.addressee(&text[..at]) {
            Addressee::Function(name) => State::Call {
                name,
                body,
                at: body,
            },
            Addressee::Client(kind) => {
                self.start += body;
                State::Text(kind)
            }
            Addressee::Unknown => {
                self.give_bytes(Kind::Content, body);
                State::Text(Kind::Content)
            }
        };
        true
    }

    fn addressee(&self, header: &str) -> Addressee {
        let word = |mark: &str| {
            let (_, rest) = header.split_once(mark)?;
            rest.split(|c: char| c.is_whitespace() || c == '<').next()
        };
        match (word(TO), word(CHANNEL)) {
            (Some(to), _) => match to.strip_prefix(OF_FUNCTIONS) {
                Some(name) if self.looked_for.calls && !name.is_empty() => {
                    Addressee::Function(name.to_owned())
                }
                _ => Addressee::Unknown,
            },
            (None, Some("analysis")) if self.looked_for.reasoning => {
                Addressee::Client(Kind::Reasoning)
            }
            (None, None | Some("analysis" | "commentary" | "final")) => {
                Addressee::Client(Kind::Content)
            }
            _ => Addressee::Unknown,
        }
    }

    fn message(&mut self, kind: Kind, end: bool) -> bool {
        let (bytes, mark) = self.until_mark(0, end);
        self.give_bytes(kind, bytes);
        match mark {
            Some(mark) => self.close(mark),
            None => self.state = State::Text(kind),
        }
        mark.is_some()
    }

    fn call(&mut self, name: String, body: usize, at: usize, end: bool) -> bool {
        let (bytes, mark) = self.until_mark(at, end);
        if mark.is_none() && !end {
            self.state = State::Call {
                name,
                body,
                at: bytes,
            };
            return false;
        }
        let text = &self.text[self.start..];
        let written = text[body..bytes].trim();
        let is_object = written.starts_with('{');
        let arguments = serde_json::from_str::<&RawValue>(written).ok();
        if let Some(arguments) = arguments.filter(|_| is_object) {
            let arguments = arguments.get().to_owned();
            self.parts
                .push(Part::Call(self.calls, Call { name, arguments }));
            self.calls += 1;
            self.start += bytes;
        } else {
            self.give_bytes(Kind::Content, bytes);
        }
        if let Some(mark) = mark {
            self.close(mark);
        }
        mark.is_some()
    }

    /// Where the text from `at` on ends: at a mark, or before what may become one.
    fn until_mark(&self, at: usize, end: bool) -> (usize, Option<&'static str>) {
        let marks = || CLOSE.iter().chain(&OPEN).copied();
        let text = &self.text[self.start..];
        let mut until = (text.len(), None);
        for (found, _) in text[at..].match_indices('<') {
            let here = &text[at + found..];
            let mark = marks().find(|mark| here.starts_with(mark));
            if mark.is_some() || (!end && marks().any(|mark| mark.starts_with(here))) {
                until = (at + found, mark);
                break;
            }
        }
        #[cfg(test)]
        super::tests::looked_at(until.0 - at);
        until
    }

    /// Ends a message. The mark stays where it is the beginning of the next one.
    fn close(&mut self, mark: &'static str) {
        self.state = State::Header;
        if CLOSE.contains(&mark) {
            self.start += mark.len();
        }
    }

    /// Gives out the next bytes.
    fn give_bytes(&mut self, kind: Kind, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut text = self.text[self.start..self.start + bytes].to_owned();
        self.start += bytes;
        let said = &mut self.said[usize::from(kind == Kind::Reasoning)];
        if std::mem::take(&mut self.is_new) && std::mem::replace(said, true) {
            text.insert_str(0, "\n\n");
        }
        match (self.parts.last_mut(), kind) {
            (Some(Part::Content(all)), Kind::Content)
            | (Some(Part::Reasoning(all)), Kind::Reasoning) => all.push_str(&text),
            (_, Kind::Content) => self.parts.push(Part::Content(text)),
            (_, Kind::Reasoning) => self.parts.push(Part::Reasoning(text)),
        }
    }
}
