//! Server-sent events, as much of them as OpenAI's streams use: the `data` of
//! each event, in place where an event came in one piece.
//!
//! An event ends with its line: the answers of every known server have one
//! `data` line an event. Comments and other fields are skipped.

use memchr::memchr2;

/// Cuts a stream of bytes into events.
#[derive(Debug, Default)]
pub struct SseReader {
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
}

impl SseReader {
    /// Calls `take` with the data of every event that `bytes` completes, until
    /// it returns an error.
    ///
    /// # Errors
    /// Only those of `take`.
    pub fn push<E>(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.rest.is_empty() {
            let Some(end) = memchr2(b'\n', b'\r', bytes) else {
                self.rest.extend_from_slice(bytes);
                return Ok(());
            };
            self.rest.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.rest);
            if let Some(data) = data_of(&line) {
                take(data)?;
            }
        }
        while let Some(end) = memchr2(b'\n', b'\r', bytes) {
            if let Some(data) = data_of(&bytes[..end]) {
                take(data)?;
            }
            bytes = &bytes[end + 1..];
        }
        self.rest.extend_from_slice(bytes);
        Ok(())
    }

    /// What came without an end of line, as an event: some servers forget the last one.
    pub fn finish(&mut self) -> Option<Vec<u8>> {
        let line = std::mem::take(&mut self.rest);
        data_of(&line).map(<[u8]>::to_vec)
    }
}

fn data_of(line: &[u8]) -> Option<&[u8]> {
    let data = line.strip_prefix(b"data:")?.trim_ascii();
    (!data.is_empty()).then_some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] =
        b": hello\r\n\r\nevent: x\ndata: {\"a\": 1}\r\n\r\ndata:2\n\nid: 7\ndata: \n\ndata: [DONE]";

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut reader = SseReader::default();
        let mut events = Vec::new();
        for piece in pieces {
            let taken: Result<(), ()> = reader.push(piece, |data| {
                events.push(String::from_utf8(data.to_vec()).unwrap());
                Ok(())
            });
            taken.unwrap();
        }
        let last = reader.finish();
        events.extend(last.map(|data| String::from_utf8(data).unwrap()));
        events
    }

    #[test]
    fn events_are_the_same_wherever_the_stream_is_cut() {
        let whole = read(&[STREAM]);
        assert_eq!(whole, ["{\"a\": 1}", "2", "[DONE]"]);
        for cut in 0..STREAM.len() {
            let (head, tail) = STREAM.split_at(cut);
            assert_eq!(read(&[head, tail]), whole, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(read(&bytes), whole);
        assert_eq!(read(&[b"data: 1\r\rdata: 2\r"]), ["1", "2"]);
    }

    #[test]
    fn an_error_stops_reading() {
        let mut reader = SseReader::default();
        let mut seen = 0;
        let taken = reader.push(b"data: 1\ndata: 2\n", |_| {
            seen += 1;
            Err("enough")
        });
        assert_eq!((taken, seen), (Err("enough"), 1));
    }
}
