//! One call on its way: header, JSON, closing mark, as their text comes.

use super::format::Format;
use super::json::{JsonScan, Scanned};

/// A longer header (white space, or a function's name and marks) begins no call.
const MAX_HEADER_BYTES: usize = 256;

/// A call that is being read. Positions count from its first mark.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub format: &'static Format,
    /// Where the header begins, and the JSON.
    pub header: usize,
    pub json: usize,
    /// Up to here it was looked at.
    pub at: usize,
    stage: Stage,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Header {
        blank: bool,
    },
    Json(JsonScan),
    /// `json_end`: where the closing mark may begin.
    Close {
        json_end: usize,
    },
}

/// What the text of a call says by now.
pub enum Verdict {
    More(Block),
    /// The call has `bytes`, marks included.
    Whole {
        block: Block,
        json_end: usize,
        bytes: usize,
    },
    /// It is no call; what follows `content` is to be looked at again.
    NoCall {
        content: usize,
    },
}

impl Block {
    /// Of a mark of so many bytes.
    pub fn new(format: &'static Format, header: usize) -> Self {
        Self {
            format,
            header,
            json: header,
            at: header,
            stage: Stage::Header { blank: true },
        }
    }

    /// Goes on where it was. `text` begins with the call's first mark; `end`: no more comes.
    pub fn read(mut self, text: &str, end: bool) -> Verdict {
        loop {
            match self.stage {
                Stage::Header { mut blank } => {
                    let is_named = !self.format.named.is_empty();
                    let most = text.len().min(self.header + MAX_HEADER_BYTES + 1);
                    let new = &text.as_bytes()[self.at..most];
                    let stop = new.iter().position(|byte| {
                        let json = *byte == b'{' || (*byte == b'[' && blank);
                        blank &= byte.is_ascii_whitespace();
                        json || !(blank || is_named)
                    });
                    let length = self.at + stop.unwrap_or(new.len()) - self.header;
                    #[cfg(test)]
                    super::tests::looked_at(stop.unwrap_or(new.len()));
                    if length > MAX_HEADER_BYTES {
                        return Verdict::NoCall {
                            content: self.header,
                        };
                    }
                    self.at = self.header + length;
                    self.stage = Stage::Header { blank };
                    match text.as_bytes().get(self.at) {
                        None => return Verdict::More(self),
                        Some(b'{' | b'[') => {
                            self.json = self.at;
                            self.stage = Stage::Json(JsonScan::default());
                        }
                        Some(_) => return Verdict::NoCall { content: self.at },
                    }
                }
                Stage::Json(mut scan) => {
                    let scanned = scan.scan(&text.as_bytes()[self.at..]);
                    self.stage = Stage::Json(scan);
                    match scanned {
                        Scanned::Broken(at) => {
                            return Verdict::NoCall {
                                content: self.at + at,
                            };
                        }
                        Scanned::Inside => {
                            self.at = text.len();
                            return Verdict::More(self);
                        }
                        Scanned::Ended(at) => {
                            self.at += at;
                            self.stage = Stage::Close { json_end: self.at };
                        }
                    }
                }
                Stage::Close { json_end } => return self.close(text, json_end, end),
            }
        }
    }

    fn close(mut self, text: &str, json_end: usize, end: bool) -> Verdict {
        let whole = |bytes| Verdict::Whole {
            block: self,
            json_end,
            bytes,
        };
        if self.format.close.is_empty() {
            return whole(json_end);
        }
        let rest = &text[self.at..];
        let here = rest.trim_start();
        let mut marks = self.format.close.iter();
        if let Some(mark) = marks.clone().find(|mark| here.starts_with(**mark)) {
            return whole(text.len() - here.len() + mark.len());
        }
        let may_come = marks.any(|mark| mark.starts_with(here));
        if may_come && end {
            // The answer was cut in the closing mark; the call is there.
            return whole(text.len());
        }
        self.at = text.len() - here.len();
        if may_come {
            Verdict::More(self)
        } else {
            Verdict::NoCall { content: self.at }
        }
    }
}
