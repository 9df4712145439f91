//! Answers that are read whole, and such that are refused.

use tokio::io::AsyncWriteExt;

use super::*;

/// What a client makes of `answer`, received `step` bytes at a time.
async fn received(answer: &[u8], step: usize) -> io::Result<(Head, String)> {
    let (ours, mut theirs) = tokio::io::duplex(step);
    let answer = answer.to_vec();
    tokio::spawn(async move {
        let mut request = [0; 3];
        theirs.read_exact(&mut request).await.unwrap();
        let _ = theirs.write_all(&answer).await;
    });
    let mut connection = Connection::new(Box::new(ours), 64);
    let mut head = connection
        .ask(b"ask")
        .await?
        .ok_or_else(|| closed("at once"))?;
    let mut body = Vec::new();
    while connection
        .body(&mut head, |piece| {
            body.extend_from_slice(piece);
            Ok::<(), io::Error>(())
        })
        .await?
    {}
    Ok((head, String::from_utf8(body).unwrap()))
}

#[tokio::test]
async fn bodies_are_whole_however_they_are_framed_and_cut() {
    for (answer, keeps_alive) in [
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
            true,
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n\
             4\r\nall \r\n5;x=1\r\nof it\r\n0\r\nTrailer: x\r\n\r\n",
            false,
        ),
        (
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nall of it",
            false,
        ),
        (
            "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
            false,
        ),
    ] {
        for step in [1, 2, 3, 7, 1000] {
            let (head, body) = received(answer.as_bytes(), step).await.unwrap();
            assert_eq!(
                (head.status, body.as_str()),
                (200, "all of it"),
                "{answer} by {step}"
            );
            assert_eq!(head.keeps_alive, keeps_alive, "{answer}");
        }
    }
    let (head, body) = received(b"HTTP/1.1 204 None\r\n\r\n", 9).await.unwrap();
    assert_eq!((head.status, body.as_str()), (204, ""));
}

#[tokio::test]
async fn a_head_that_trickles_is_parsed_once_for_each_line() {
    let (ours, mut theirs) = tokio::io::duplex(1);
    let long = "x".repeat(10_000);
    let head = format!("HTTP/1.1 200 OK\r\nLong: {long}\r\nContent-Length: 0\r\n\r\n");
    tokio::spawn(async move {
        theirs.read_exact(&mut [0; 3]).await.unwrap();
        theirs.write_all(head.as_bytes()).await.unwrap();
    });
    let mut connection = Connection::new(Box::new(ours), 64);
    let head = connection.ask(b"ask").await.unwrap();
    assert_eq!(head.map(|head| head.status), Some(200));
    assert!(connection.parses < 10, "{} times", connection.parses);
}

#[tokio::test]
async fn a_closed_connection_is_not_quiet_and_an_early_answer_counts() {
    let (ours, mut theirs) = tokio::io::duplex(100);
    let mut connection = Connection::new(Box::new(ours), 64);
    assert!(connection.is_quiet());
    let refusal = b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n";
    theirs.write_all(refusal).await.unwrap();
    drop(theirs);
    let head = connection.ask(&[b'x'; 1000]).await.unwrap();
    assert_eq!(head.map(|head| head.status), Some(413));
    assert!(!connection.is_quiet());
}

/// What a client with a request of 1000 bytes makes of an answer that comes before the server has
/// read it. The server reads so many bytes of it, and keeps the connection open.
async fn answered_early(answer: &str, reads: usize) -> (Head, String) {
    let (ours, mut theirs) = tokio::io::duplex(100);
    let mut connection = Connection::new(Box::new(ours), 64);
    theirs.write_all(answer.as_bytes()).await.unwrap();
    let server = async {
        let mut request = vec![0; reads];
        theirs.read_exact(&mut request).await.unwrap();
    };
    let client = async {
        let head = connection.ask(&[b'x'; 1000]).await.unwrap();
        let mut head = head.expect("an answer");
        let mut body = Vec::new();
        let mut take = |piece: &[u8]| {
            body.extend_from_slice(piece);
            Ok::<(), io::Error>(())
        };
        while connection.body(&mut head, &mut take).await.unwrap() {}
        (head, String::from_utf8(body).unwrap())
    };
    let mut both = pin!(async { tokio::join!(server, client) });
    // Nothing outside is waited for, so it ends within a few polls or never.
    let mut polls = (0..100).filter_map(|_| both.as_mut().now_or_never());
    let (_, received) = polls.next().expect("it hangs");
    received
}

#[tokio::test]
async fn an_answer_is_read_though_the_server_does_not_read_the_request() {
    let refusal = "HTTP/1.1 413 Too large\r\nContent-Length: 6\r\n\r\nrefuse";
    let (head, body) = answered_early(refusal, 1).await;
    assert_eq!((head.status, body.as_str()), (413, "refuse"));
    assert!(
        !head.keeps_alive,
        "the server may read the rest as a request"
    );
    let success = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let (head, body) = answered_early(success, 1000).await;
    assert_eq!((head.status, body.as_str()), (200, "ok"));
    assert!(head.keeps_alive, "it has the whole request");
}

#[tokio::test]
async fn what_is_cut_off_or_no_http_is_an_error() {
    for (answer, says) in [
        ("", "at once"),
        ("HTTP/1.1 200", "in the head"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall",
            "in the middle",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nal",
            "in the middle",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nall \r\n",
            "in the middle",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nall \r\n",
            "longer",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
            "no size",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nall \r\n\r\n\r\n",
            "no size",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "encoding \"gzip",
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nall", "length"),
        ("HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nall", "length"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nall",
            "two lengths",
        ),
        ("SSH-2.0-OpenSSH_9.9\r\n", "invalid"),
    ] {
        for step in [1, 1000] {
            let error = received(answer.as_bytes(), step)
                .await
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{answer:?} by {step}: {error}");
        }
    }
}
