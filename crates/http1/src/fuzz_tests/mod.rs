//! Answers of servers, whole, cut off and wrong. `make fuzz` runs this for long.
//!
//! What the client makes of the bytes, received in pieces of any size, is compared with a plain
//! reader of the same bytes that has them all at once.

mod plain_reader;

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use rand::Rng;
use tasuki_searches::{Random, fuzz};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::plain_reader::expected;
use crate::{Connection, Head, MAX_HEAD_BYTES};

/// Valid answers, some of them several on one connection.
const CORPUS: [&str; 18] = [
    "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Type: text/event-stream\r\n\r\nall of it",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nall \r\n5\r\nof it\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\nA;x=\"1\"\r\n0123456789\r\n00\r\nTrailer: x\r\nOther: y\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n1e  \r\ndata: {\"choices\":[{\"index\":0\r\n\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the connection is closed",
    "HTTP/1.1 200 OK\r\nDate: today\r\n\r\nuntil the connection is closed",
    "HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfour",
    "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 4\r\n\r\nfourHTTP/1.0 404 No\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
    "HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\nHTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy",
    "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nHTTP/1.1 500 Error\r\nConnection: close\r\nContent-Length: 1\r\n\r\n!",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\ntwice",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n[]",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 7\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "HTTP/1.1 413 Too large\r\nConnection: close, x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/1.1 200\r\nX:\r\nContent-Length:   1  \r\n\r\nx",
    "\r\nHTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
];

/// What the buffer may hold: a head, what is read at once, and room to grow.
const MOST_BUFFERED: usize = 4 * MAX_HEAD_BYTES;

/// An answer as far as it came.
#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    content_type: String,
    keeps_alive: bool,
    body: Vec<u8>,
    is_whole: bool,
}

/// Why there are no more answers.
#[derive(Debug, PartialEq)]
enum End {
    /// The server closed the connection between two answers.
    Closed,
    /// The last answer was the connection's last.
    Last,
    Broken,
}

/// A server that sends these pieces whatever it is asked, and closes the connection.
struct Script {
    pieces: VecDeque<Vec<u8>>,
    /// Sent again and again before the end, so many bytes of it.
    flood: (Vec<u8>, usize),
}

impl AsyncRead for Script {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let script = &mut *self;
        if script.pieces.is_empty() && script.flood.1 > 0 {
            script.flood.1 = script.flood.1.saturating_sub(script.flood.0.len());
            script.pieces.push_back(script.flood.0.clone());
        }
        if let Some(mut piece) = script.pieces.pop_front() {
            let rest = piece.split_off(piece.len().min(buffer.remaining()));
            buffer.put_slice(&piece);
            if !rest.is_empty() {
                script.pieces.push_front(rest);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// What the client makes of a server's bytes, asking as long as the connection is kept.
fn received(script: Script, read_bytes: usize) -> (Vec<Answer>, End) {
    let mut connection = Connection::new(Box::new(script), read_bytes);
    let mut answers = Vec::new();
    loop {
        let asked = connection.ask(b"ask").now_or_never().expect("no wait");
        let mut head = match asked {
            Ok(Some(head)) => head,
            Ok(None) => return (answers, End::Closed),
            Err(_) => return (answers, End::Broken),
        };
        let (body, is_whole) = body(&mut connection, &mut head);
        let keeps_alive = head.keeps_alive;
        answers.push(Answer {
            status: head.status,
            content_type: head.content_type,
            keeps_alive,
            body,
            is_whole,
        });
        if !is_whole {
            return (answers, End::Broken);
        }
        if !keeps_alive {
            return (answers, End::Last);
        }
        assert!(!connection.is_quiet(), "the server has sent more or closed");
    }
}

/// The body as far as it comes, and whether that is all of it.
fn body(connection: &mut Connection, head: &mut Head) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    loop {
        let take = |piece: &[u8]| {
            assert!(!piece.is_empty());
            bytes.extend_from_slice(piece);
            Ok::<(), io::Error>(())
        };
        let more = connection.body(head, take).now_or_never().expect("no wait");
        let buffered = connection.buffer.capacity();
        assert!(buffered <= MOST_BUFFERED, "{buffered} bytes are buffered");
        match more {
            Ok(true) => {}
            Ok(false) => return (bytes, head.is_over()),
            Err(_) => return (bytes, false),
        }
    }
}

fn cut(bytes: &[u8], random: &mut Random) -> VecDeque<Vec<u8>> {
    // Small pieces of a long head would take long: it is parsed again with each.
    let most = if bytes.len() < 2_000 { 40 } else { 4_000 };
    let mut pieces = VecDeque::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(random.random_range(1..=rest.len().min(most)));
        pieces.push_back(piece.to_vec());
        rest = later;
    }
    pieces
}

#[test]
fn valid_answers_are_whole_and_cut_ones_are_not() {
    for answer in CORPUS {
        let bytes = answer.as_bytes();
        let (answers, end) = expected(bytes);
        assert!(answers.iter().all(|answer| answer.is_whole), "{answer:?}");
        assert_ne!(end, End::Broken, "{answer:?}");
        for length in 0..=bytes.len() {
            let script = Script {
                pieces: bytes[..length].iter().map(|&byte| vec![byte]).collect(),
                flood: (Vec::new(), 0),
            };
            let got = received(script, 64);
            assert_eq!(
                got,
                expected(&bytes[..length]),
                "{answer:?}, {length} bytes"
            );
            if length < bytes.len() && answers.iter().all(|answer| answer.keeps_alive) {
                assert!(got.0.len() < answers.len() || !got.0[answers.len() - 1].is_whole);
            }
        }
    }
}

#[test]
fn lines_without_an_end_are_refused_before_they_fill_the_memory() {
    for (begin, part) in [
        ("HTTP/1.1 200 OK\r\nX: ", "x"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;",
            "x",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
            "x",
        ),
    ] {
        let script = Script {
            pieces: VecDeque::from([begin.as_bytes().to_vec()]),
            flood: (part.repeat(5_000).into_bytes(), 3 * MOST_BUFFERED),
        };
        let mut connection = Connection::new(Box::new(script), 16 << 10);
        let asked = connection.ask(b"ask").now_or_never().expect("no wait");
        if let Ok(head) = asked {
            let mut head = head.expect("an answer");
            assert_eq!(
                body(&mut connection, &mut head),
                (Vec::new(), false),
                "{begin:?}"
            );
        }
        let rest = connection.read().now_or_never().expect("no wait");
        assert_ne!(rest.expect("no error"), 0, "{begin:?}: all of it was read");
        assert!(connection.buffer.capacity() <= MOST_BUFFERED, "{begin:?}");
    }
}

#[test]
fn fuzzed_responses_are_whole_or_errors_however_they_are_cut() {
    let corpus = CORPUS.map(|answer| answer.as_bytes().to_vec());
    fuzz("responses", &corpus, 20_000, |bytes, random| {
        let length = if random.random_bool(0.5) {
            random.random_range(0..=bytes.len())
        } else {
            bytes.len()
        };
        let sent = &bytes[..length];
        let expected = expected(sent);
        for pieces in [VecDeque::from([sent.to_vec()]), cut(sent, random)] {
            let script = Script {
                pieces,
                flood: (Vec::new(), 0),
            };
            assert_eq!(received(script, random.random_range(1..9_000)), expected);
        }
        // A server that never ends what it has begun.
        if !sent.is_empty() && random.random_bool(0.01) {
            let from = random.random_range(0..sent.len());
            let part = sent[from..].repeat(4_096 / (sent.len() - from) + 1);
            let script = Script {
                pieces: cut(sent, random),
                flood: (part, 3 * MOST_BUFFERED),
            };
            received(script, 16 << 10);
        }
    });
}
