//! One call on its way: header, JSON or tags, closing mark, as their text comes.

use super::format::{Call, Format};
use super::json::{JsonScan, Scanned};
use super::scanner::next_mark;
use super::schemas::Schemas;
use super::tags::Tags;

/// A longer header (white space, or a function's name and marks) begins no call, nor does so much
/// text between two values in tags.
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
    /// `outside`: where what is no value began; `None`: in a value.
    Tags {
        tags: &'static Tags,
        outside: Option<usize>,
    },
    /// Behind what ends the call, where a value's own closing mark may have been left out.
    TagsEnd {
        tags: &'static Tags,
    },
    /// `json_end`: where the closing mark may begin.
    Close {
        json_end: usize,
    },
}

/// What the text of a call says by now.
pub enum Verdict {
    More(Block),
    /// The call has `bytes`, marks included; its JSON or tags end at `end`.
    Whole {
        block: Block,
        end: usize,
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
                        Some(_) => match self.format.tags {
                            Some(tags) => {
                                let outside = Some(self.at);
                                self.stage = Stage::Tags { tags, outside };
                            }
                            None => return Verdict::NoCall { content: self.at },
                        },
                    }
                }
                Stage::Tags { tags, outside } => match self.tags(text, tags, outside, end) {
                    Ok(read) => self = read,
                    Err(verdict) => return verdict,
                },
                Stage::TagsEnd { tags } => {
                    let close = self.format.close[0];
                    let rest = text[self.at..].trim_start();
                    self.at = text.len() - rest.len();
                    if rest.starts_with(close) || (end && close.starts_with(rest)) {
                        return Verdict::Whole {
                            block: self,
                            end: self.at,
                            bytes: self.at + rest.len().min(close.len()),
                        };
                    }
                    if close.starts_with(rest) {
                        return Verdict::More(self);
                    }
                    let outside = None;
                    self.stage = Stage::Tags { tags, outside };
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

    /// The calls of one that is whole; `None`: it is none.
    pub fn calls(&self, text: &str, end: usize, schemas: &Schemas) -> Option<Vec<Call>> {
        match self.stage {
            Stage::Tags { tags, .. } | Stage::TagsEnd { tags } => {
                let call = tags.call(&text[self.header..end], schemas)?;
                Some(vec![call])
            }
            _ => {
                let header = &text[self.header..self.json];
                self.format.calls(header, &text[self.json..end])
            }
        }
    }

    /// Goes on to the next tag. `outside`: where what is no value began.
    fn tags(
        mut self,
        text: &str,
        tags: &'static Tags,
        outside: Option<usize>,
        end: bool,
    ) -> Result<Self, Verdict> {
        let close = self.format.close[0];
        let marks = match outside {
            Some(_) => &[tags.value_mark(), close, self.format.open][..],
            None if tags.line_feeds => &[tags.value.1, tags.end],
            None => &[tags.value.1],
        };
        let (bytes, mark) = next_mark(&text[self.at..], &[marks], false);
        let at = self.at + bytes;
        if let Some(since) = outside.filter(|since| at - since > MAX_HEADER_BYTES) {
            return Err(Verdict::NoCall { content: since });
        }
        let Some(mark) = mark else {
            self.at = at;
            // Cut in the closing mark the call is there, if it is known to have all its arguments.
            let is_cut = end && outside.is_some() && close.starts_with(&text[at..]);
            return Err(match is_cut && !tags.end.is_empty() {
                true => Verdict::Whole {
                    block: self,
                    end: at,
                    bytes: text.len(),
                },
                false => Verdict::More(self),
            });
        };
        self.at = at + mark.len();
        let outside = match outside {
            None if mark != tags.value.1 => {
                if text[..at].ends_with('\n') {
                    self.stage = Stage::TagsEnd { tags };
                }
                return Ok(self);
            }
            None => Some(self.at),
            Some(_) if mark == close => {
                return Err(Verdict::Whole {
                    block: self,
                    end: at,
                    bytes: self.at,
                });
            }
            Some(_) if mark == self.format.open => return Err(Verdict::NoCall { content: at }),
            Some(_) => None,
        };
        self.stage = Stage::Tags { tags, outside };
        Ok(self)
    }

    fn close(mut self, text: &str, json_end: usize, end: bool) -> Verdict {
        let whole = |bytes| Verdict::Whole {
            block: self,
            end: json_end,
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
