//! https by real connections.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::{Tls, TlsArgs};
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::connections::{ConnectionLimits, serve};
use crate::testing::{FakeGenerator, app};
use crate::workers::testing::until;

const LONG: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_millis(300);

/// Writes a certificate for `localhost` and its key; returns what a client is to trust.
fn new_certificate(args: &TlsArgs) -> CertificateDer<'static> {
    let made = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let CertifiedKey { cert, signing_key } = made;
    std::fs::write(args.tls_key.as_ref().unwrap(), signing_key.serialize_pem()).unwrap();
    std::fs::write(args.tls_cert.as_ref().unwrap(), cert.pem()).unwrap();
    cert.der().clone()
}

fn files(folder: &Path) -> TlsArgs {
    TlsArgs {
        tls_cert: Some(folder.join("cert.pem")),
        tls_key: Some(folder.join("key.pem")),
    }
}

struct Server {
    address: SocketAddr,
    args: TlsArgs,
    trusted: CertificateDer<'static>,
    _folder: TempDir,
}

async fn start() -> Server {
    let folder = tempfile::tempdir().unwrap();
    let args = files(folder.path());
    let trusted = new_certificate(&args);
    let tls = Tls::load(&args).unwrap().unwrap();
    tokio::spawn(Arc::clone(&tls).keep_reading());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = ConnectionLimits {
        max_connections: 8,
        idle: IDLE,
        client_stall: LONG,
    };
    let app = app(Arc::new(FakeGenerator::saying("Hi")));
    tokio::spawn(serve(
        listener,
        app,
        limits,
        Some(tls),
        std::future::pending(),
    ));
    Server {
        address,
        args,
        trusted,
        _folder: folder,
    }
}

/// The answer to a GET over https, by a client that trusts one certificate.
async fn get(server: &Server, trusted: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(server.address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name, stream).await?;
    let request = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await?;
    let mut answer = String::new();
    timeout(LONG, stream.read_to_string(&mut answer)).await??;
    Ok(answer)
}

#[tokio::test]
async fn https_is_served_and_http_is_not() {
    let server = start().await;
    let answer = get(&server, &server.trusted).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let mut plain = TcpStream::connect(server.address).await.unwrap();
    plain
        .write_all(b"GET /live HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = timeout(LONG, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_client_that_says_nothing_is_cut_off() {
    let server = start().await;
    let mut silent = TcpStream::connect(server.address).await.unwrap();
    let ended = timeout(LONG, silent.read(&mut [0])).await;
    assert_eq!(ended.expect("it is cut off").unwrap_or(0), 0);
}

#[tokio::test]
async fn a_new_certificate_is_taken_and_a_broken_one_is_not() {
    let server = start().await;
    let new = new_certificate(&server.args);
    let renewed = async {
        while get(&server, &new).await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(LONG, renewed).await.expect("it is read again");
    assert!(get(&server, &server.trusted).await.is_err());
    std::fs::write(server.args.tls_cert.as_ref().unwrap(), "no PEM").unwrap();
    sleep(Duration::from_millis(1_500)).await;
    get(&server, &new).await.expect("the one before is used");
}

#[tokio::test]
async fn an_error_that_comes_again_is_logged_again() {
    let (lines, _guard) = Lines::keep("warn", AccessLog::Off);
    let folder = tempfile::tempdir().unwrap();
    let args = files(folder.path());
    new_certificate(&args);
    let tls = Tls::load(&args).unwrap().unwrap();
    let reading = tokio::spawn(tls.keep_reading());
    let cert = args.tls_cert.as_ref().unwrap();
    let good = std::fs::read(cert).unwrap();
    for times in 1..3 {
        std::fs::write(cert, "no PEM").unwrap();
        let logged = || lines.text().matches("stays as it was").count() == times;
        until("the error", logged).await;
        std::fs::write(cert, &good).unwrap();
        sleep(Duration::from_millis(1_500)).await;
    }
    reading.abort();
}

#[test]
fn what_is_wrong_with_the_files_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let args = files(folder.path());
    let error = || Tls::load(&args).err().expect("an error").to_string();
    assert!(error().contains("--tls-cert") && error().contains("cannot be read"));
    new_certificate(&args);
    assert!(Tls::load(&args).is_ok());
    let (cert, key) = (
        args.tls_cert.as_ref().unwrap(),
        args.tls_key.as_ref().unwrap(),
    );
    std::fs::write(cert, "").unwrap();
    assert!(error().contains("no certificate"), "{}", error());
    new_certificate(&args);
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    for no_key in ["", encrypted] {
        std::fs::write(key, no_key).unwrap();
        let error = error();
        for says in ["--tls-key", "no private key", "openssl pkey"] {
            assert!(error.contains(says), "{error}");
        }
    }
    let other = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(key, other.signing_key.serialize_pem()).unwrap();
    assert!(error().contains("do not fit together"), "{}", error());
}
