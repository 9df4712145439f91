//! A relay between clients and a pair of HTTP workers: it copies bytes, and so says what a router
//! costs without routing.
//!
//! Each client's connection has one of its own to either worker. A request goes to the prefill
//! worker as it came; when that has answered, to the decode worker; what comes from there goes to
//! the client as it comes, with a pause of `--pause-ms` before each further read. A GET is the
//! prefill worker's. Nothing is parsed but where a message ends; nothing is placed, counted, timed
//! or given up. Only for well-behaved clients and workers. Ends with its standard input.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use clap::Parser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Reads of an answer, bytes.
const PIECE: usize = 64 << 10;

#[derive(Parser, Clone)]
struct Args {
    #[arg(long)]
    port: u16,
    /// HOST:PORT
    #[arg(long)]
    prefill: String,
    /// HOST:PORT
    #[arg(long)]
    decode: String,
    /// Milliseconds between two reads of an answer
    #[arg(long, default_value_t = 0.0)]
    pause_ms: f64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let listener = TcpListener::bind(("127.0.0.1", args.port)).await?;
    let mut end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    loop {
        tokio::select! {
            client = listener.accept() => {
                let (client, _) = client?;
                let args = args.clone();
                tokio::spawn(async move {
                    // The client goes, or a worker: so does the other side.
                    let _ = serve(client, &args).await;
                });
            }
            ended = &mut end => return ended?.map(drop),
        }
    }
}

async fn serve(mut client: TcpStream, args: &Args) -> std::io::Result<()> {
    let mut prefill = TcpStream::connect(&args.prefill).await?;
    let mut decode = TcpStream::connect(&args.decode).await?;
    for stream in [&client, &prefill, &decode] {
        stream.set_nodelay(true)?;
    }
    let mut message = Vec::with_capacity(PIECE);
    let mut piece = vec![0; PIECE];
    loop {
        if !read_message(&mut client, &mut message).await? {
            return Ok(());
        }
        prefill.write_all(&message).await?;
        if message.starts_with(b"GET ") {
            read_message(&mut prefill, &mut message).await?;
            client.write_all(&message).await?;
            continue;
        }
        decode_after(&mut prefill, &mut decode, &message).await?;
        let mut tail = [0; LAST.len()];
        loop {
            let size = decode.read(&mut piece).await?;
            if size == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            client.write_all(&piece[..size]).await?;
            if ends(&mut tail, &piece[..size]) {
                break;
            }
            if args.pause_ms > 0.0 {
                tokio::time::sleep(Duration::from_secs_f64(args.pause_ms / 1e3)).await;
            }
        }
    }
}

/// The prefill worker's answer is dropped, and the request goes on to the decode worker.
async fn decode_after(
    prefill: &mut TcpStream,
    decode: &mut TcpStream,
    request: &[u8],
) -> std::io::Result<()> {
    let mut answer = Vec::new();
    if !read_message(prefill, &mut answer).await? {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    decode.write_all(request).await
}

/// The end of a chunked answer.
const LAST: &[u8; 7] = b"\r\n0\r\n\r\n";

/// Whether the answer is over; `tail`: its last bytes so far.
fn ends(tail: &mut [u8; LAST.len()], piece: &[u8]) -> bool {
    let mut all = tail.to_vec();
    all.extend_from_slice(&piece[piece.len().saturating_sub(LAST.len())..]);
    tail.copy_from_slice(&all[all.len() - LAST.len()..]);
    tail == LAST
}

/// A message with a length, whole. False: the connection has ended before it.
async fn read_message(stream: &mut TcpStream, message: &mut Vec<u8>) -> std::io::Result<bool> {
    message.clear();
    loop {
        if let Some(length) = length(message)
            && message.len() >= length
        {
            return Ok(true);
        }
        if stream.read_buf(message).await? == 0 {
            return Ok(false);
        }
    }
}

/// Bytes of the message, once its head is there.
fn length(message: &[u8]) -> Option<usize> {
    let head = message.windows(4).position(|four| four == b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&message[..head]).to_ascii_lowercase();
    let body = text.lines().find_map(|line| {
        line.strip_prefix("content-length:")?
            .trim()
            .parse::<usize>()
            .ok()
    });
    Some(head + 4 + body.unwrap_or(0))
}
