//! Tells content, reasoning and tool calls of one answer apart, as its text comes.
//!
//! However the text is cut, the same parts come out: a call comes whole, and text is held
//! back only while it may be the beginning of a mark or of a call. What turns out to be no
//! call is content, as it was written. Each byte is looked at a bounded number of times.

use super::block::{Block, Verdict};
use super::format::{Call, Format};
use super::schemas::Schemas;

/// The marks around reasoning.
pub const THINK: [&str; 2] = ["<think>", "</think>"];

/// What every mark begins with.
pub const MARK_STARTS: [char; 2] = ['<', '['];

/// Something that an answer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Content(String),
    Reasoning(String),
    /// With its number among the answer's calls.
    Call(usize, Call),
}

/// Where an answer may have reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Nowhere, or it is not asked for.
    Ignored,
    /// At its beginning, behind the mark.
    Marked,
    /// The answer begins in it: the mark is the prompt's end.
    Begun,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Scanner {
    format: Option<&'static Format>,
    schemas: Schemas,
    state: State,
    /// The text that is not given out, from `start` on.
    text: String,
    start: usize,
    /// White space that is dropped unless text of the same kind follows.
    gap: String,
    /// Content has not begun, or not again after a call.
    in_gap: bool,
    /// The gap follows reasoning: it belongs to the marks.
    after_reasoning: bool,
    parts: Vec<Part>,
    calls: usize,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Beginning(Reasoning),
    /// `begun`: some of it was no white space.
    Reasoning {
        begun: bool,
    },
    Content,
    Call(Block),
}

impl Scanner {
    pub fn new(format: Option<&'static Format>, schemas: Schemas, reasoning: Reasoning) -> Self {
        Self {
            format,
            schemas,
            state: State::Beginning(reasoning),
            text: String::new(),
            start: 0,
            gap: String::new(),
            in_gap: true,
            after_reasoning: false,
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
        if self.calls == 0 && !self.after_reasoning {
            self.flush_gap();
        }
        std::mem::take(&mut self.parts)
    }

    fn run(&mut self, end: bool) {
        while match self.state {
            State::Beginning(reasoning) => self.beginning(reasoning, end),
            State::Reasoning { begun } => self.reasoning(begun, end),
            State::Content => self.content(end),
            State::Call(block) => self.call(block, end),
        } {}
        self.text.drain(..self.start);
        self.start = 0;
    }

    // Each state takes what it can from the text. True: the next state goes on with the rest.

    fn beginning(&mut self, reasoning: Reasoning, end: bool) -> bool {
        self.state = State::Content;
        if reasoning == Reasoning::Ignored {
            return true;
        }
        self.take_gap(char::is_whitespace);
        let rest = &self.text[self.start..];
        let marked = rest.starts_with(THINK[0]);
        if !marked && !end && THINK[0].starts_with(rest) {
            self.state = State::Beginning(reasoning);
            return false;
        }
        if marked || reasoning == Reasoning::Begun {
            self.start += if marked { THINK[0].len() } else { 0 };
            self.gap.clear();
            self.state = State::Reasoning { begun: false };
        }
        true
    }

    fn reasoning(&mut self, mut begun: bool, end: bool) -> bool {
        let (text, mark) = self.take_until(&[&THINK[1..]], end);
        let text = if begun { &text } else { text.trim_start() };
        let solid = text.trim_end();
        if !solid.is_empty() {
            begun = true;
            let text = std::mem::take(&mut self.gap) + solid;
            self.parts.push(Part::Reasoning(text));
        }
        self.gap.push_str(&text[solid.len()..]);
        if mark.is_none() && !end {
            self.state = State::Reasoning { begun };
            return false;
        }
        self.gap.clear();
        self.after_reasoning = true;
        self.state = State::Content;
        true
    }

    fn content(&mut self, end: bool) -> bool {
        if self.in_gap {
            let bare = self.format.filter(|format| format.bare);
            let several = bare.is_some() && self.calls > 0;
            self.take_gap(|c| c.is_whitespace() || (c == ';' && several));
            if let Some(format) = bare.filter(|_| self.text[self.start..].starts_with('{')) {
                self.state = State::Call(Block::new(format, 0));
                return true;
            }
        }
        let marks = self
            .format
            .map(|f| [std::slice::from_ref(&f.open), f.around]);
        let (text, mark) = self.take_until(marks.as_ref().map_or(&[], |marks| &marks[..]), end);
        self.give(&text);
        let (Some(format), Some(mark)) = (self.format, mark) else {
            return false;
        };
        if mark == format.open {
            self.start -= mark.len();
            self.state = State::Call(Block::new(format, mark.len()));
        } else if self.calls == 0 {
            self.gap.push_str(mark);
            (self.in_gap, self.after_reasoning) = (true, false);
        }
        true
    }

    fn call(&mut self, block: Block, end: bool) -> bool {
        let rest = &self.text[self.start..];
        let verdict = block.read(rest, end);
        self.state = State::Content;
        match verdict {
            Verdict::More(block) if !end => {
                self.state = State::Call(block);
                return false;
            }
            Verdict::More(_) => self.give_bytes(rest.len()),
            Verdict::NoCall { content } => self.give_bytes(content),
            Verdict::Whole { block, end, bytes } => match block.calls(rest, end, &self.schemas) {
                Some(calls) => {
                    for call in calls {
                        self.parts.push(Part::Call(self.calls, call));
                        self.calls += 1;
                    }
                    self.start += bytes;
                    self.gap.clear();
                    (self.in_gap, self.after_reasoning) = (true, false);
                }
                None => self.give_bytes(bytes),
            },
        }
        true
    }

    /// Moves what is of a gap to the gap.
    fn take_gap(&mut self, is_gap: impl Fn(char) -> bool) {
        let rest = &self.text[self.start..];
        let bytes = rest.find(|c| !is_gap(c)).unwrap_or(rest.len());
        self.gap.push_str(&rest[..bytes]);
        self.start += bytes;
    }

    /// Takes the text before the first of the marks, and the mark; what may become a mark
    /// stays, unless this is the `end`.
    fn take_until(
        &mut self,
        marks: &[&[&'static str]],
        end: bool,
    ) -> (String, Option<&'static str>) {
        let rest = &self.text[self.start..];
        let (bytes, mark) = next_mark(rest, marks, end);
        let text = rest[..bytes].to_owned();
        self.start += bytes + mark.map_or(0, str::len);
        (text, mark)
    }

    /// Gives out the next bytes as content.
    fn give_bytes(&mut self, bytes: usize) {
        let text = self.text[self.start..self.start + bytes].to_owned();
        self.start += bytes;
        self.give(&text);
    }

    fn give(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if std::mem::take(&mut self.after_reasoning) {
            self.gap.clear();
        }
        self.flush_gap();
        self.in_gap = false;
        self.append(text);
    }

    fn flush_gap(&mut self) {
        let gap = std::mem::take(&mut self.gap);
        self.append(&gap);
    }

    fn append(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Content(content)) => content.push_str(text),
            _ => self.parts.push(Part::Content(text.to_owned())),
        }
    }
}

/// The first of the marks in a text, and the bytes before it. Without one, the bytes before what may
/// become a mark, unless this is the `end`.
pub fn next_mark(
    text: &str,
    marks: &[&[&'static str]],
    end: bool,
) -> (usize, Option<&'static str>) {
    let all = || marks.iter().copied().flatten().copied();
    let mut found = (text.len(), None);
    for (at, _) in text.match_indices(MARK_STARTS) {
        let here = &text[at..];
        let mark = all().find(|mark| here.starts_with(mark));
        if mark.is_some() || (!end && all().any(|mark| mark.starts_with(here))) {
            found = (at, mark);
            break;
        }
    }
    #[cfg(test)]
    super::tests::looked_at(found.1.map_or(text.len(), |mark| found.0 + mark.len()));
    found
}
