//! What the beginning of an answer says, and with it where its body ends.

use std::io;

use bytes::{Buf, BytesMut};
use httparse::{Status, parse_chunk_size};

/// Of a chunk's size with its extensions, or of a trailer.
const MAX_LINE_BYTES: usize = 16 << 10;

/// The beginning of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    /// As it was written; empty: it has none.
    pub content_type: String,
    /// How the body is compressed, as it was written; empty: not at all.
    pub content_encoding: String,
    /// The connection may carry another request after this answer.
    pub keeps_alive: bool,
    pub(crate) framing: Framing,
}

/// Where a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// After so many bytes more.
    Length(u64),
    Chunked(Chunked),
    UntilClosed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chunked {
    /// A line with a chunk's size comes next.
    Size,
    /// So many bytes of a chunk are left.
    Data(u64),
    /// The line end after a chunk's data.
    DataEnd,
    /// Lines after the last chunk, up to an empty one.
    Trailer,
    End,
}

impl Head {
    /// # Errors
    ///
    /// It does not say where its body ends.
    pub(crate) fn new(response: &httparse::Response<'_, '_>) -> io::Result<Self> {
        let values = |name: &str| {
            let headers = response.headers.iter();
            let named = headers.filter(|header| header.name.eq_ignore_ascii_case(name));
            let values = named.map(|header| String::from_utf8_lossy(header.value).into_owned());
            values.collect::<Vec<_>>()
        };
        let connection = values("connection").join(",").to_ascii_lowercase();
        let status = response.code.unwrap_or_default();
        let framing = if status == 204 || status == 304 {
            Framing::Length(0)
        } else {
            Framing::of(&values("transfer-encoding"), &values("content-length"))?
        };
        let keeps_alive = match response.version {
            Some(1) => !connection.contains("close"),
            _ => connection.contains("keep-alive"),
        };
        Ok(Self {
            status,
            content_type: values("content-type")
                .into_iter()
                .next()
                .unwrap_or_default(),
            content_encoding: values("content-encoding").join(","),
            keeps_alive: keeps_alive && framing != Framing::UntilClosed,
            framing,
        })
    }

    /// Whether the whole body was taken.
    pub fn is_over(&self) -> bool {
        self.framing.is_over()
    }
}

impl Framing {
    /// By the values of the two headers. An answer that has both is chunked.
    fn of(encodings: &[String], lengths: &[String]) -> io::Result<Self> {
        let encoding = encodings.join(",").to_ascii_lowercase();
        match encoding.trim() {
            "" | "identity" => {}
            "chunked" => return Ok(Self::Chunked(Chunked::Size)),
            other => {
                return Err(wrong(format!(
                    "its answer has the transfer encoding {other:?}"
                )));
            }
        }
        let mut numbers = lengths.iter().map(|length| {
            let digits = length.trim();
            let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.parse().ok().filter(|_| is_number);
            number.ok_or_else(|| wrong(format!("its answer has the length {length:?}")))
        });
        let Some(first) = numbers.next().transpose()? else {
            return Ok(Self::UntilClosed);
        };
        for number in numbers {
            if number? != first {
                return Err(wrong("its answer has two lengths".to_owned()));
            }
        }
        Ok(Self::Length(first))
    }

    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunked(Chunked::End))
    }

    /// How many bytes of body lie at the beginning of `buffer`, once what is
    /// not body before them is gone. None: there is no more of it.
    pub(crate) fn piece(&mut self, buffer: &mut BytesMut) -> io::Result<Option<usize>> {
        let length = match self {
            Self::UntilClosed => buffer.len(),
            Self::Length(left) => take_up_to(left, buffer),
            Self::Chunked(chunked) => chunked.piece(buffer)?,
        };
        Ok((length > 0).then_some(length))
    }
}

impl Chunked {
    fn piece(&mut self, buffer: &mut BytesMut) -> io::Result<usize> {
        loop {
            match self {
                Self::Data(0) => *self = Self::DataEnd,
                Self::Data(left) => return Ok(take_up_to(left, buffer)),
                Self::DataEnd if buffer.len() < 2 => return Ok(0),
                Self::DataEnd => {
                    if !buffer.starts_with(b"\r\n") {
                        return Err(wrong("a chunk is longer than its size says".to_owned()));
                    }
                    buffer.advance(2);
                    *self = Self::Size;
                }
                Self::Size => {
                    let Some(size) = chunk_size(buffer)? else {
                        return Ok(0);
                    };
                    *self = if size == 0 {
                        Self::Trailer
                    } else {
                        Self::Data(size)
                    };
                }
                Self::Trailer => {
                    let end = memchr::memchr(b'\n', buffer);
                    if end.unwrap_or(buffer.len()) >= MAX_LINE_BYTES {
                        return Err(wrong("a trailer is too long".to_owned()));
                    }
                    let Some(end) = end else {
                        return Ok(0);
                    };
                    let is_empty = buffer[..end].trim_ascii().is_empty();
                    buffer.advance(end + 1);
                    if is_empty {
                        *self = Self::End;
                    }
                }
                Self::End => return Ok(0),
            }
        }
    }
}

/// As much of `left` as is there.
fn take_up_to(left: &mut u64, buffer: &BytesMut) -> usize {
    let length = (buffer.len() as u64).min(*left);
    *left -= length;
    length as usize
}

/// Takes the line with a chunk's size from the buffer. None: it is not there as a whole.
fn chunk_size(buffer: &mut BytesMut) -> io::Result<Option<u64>> {
    let no_size = || wrong("a chunk has no size".to_owned());
    // An empty line would be read as a size of 0, the end of the body.
    if buffer.first().is_some_and(|byte| !byte.is_ascii_hexdigit()) {
        return Err(no_size());
    }
    let parsed = parse_chunk_size(buffer).map_err(|_| no_size())?;
    let length = match parsed {
        Status::Complete((length, _)) => length,
        Status::Partial => buffer.len(),
    };
    if length > MAX_LINE_BYTES {
        return Err(wrong("the size of a chunk is too long a line".to_owned()));
    }
    let Status::Complete((length, size)) = parsed else {
        return Ok(None);
    };
    buffer.advance(length);
    Ok(Some(size))
}

/// An answer that no server sends that keeps to HTTP.
fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
