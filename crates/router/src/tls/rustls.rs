//! A build with https, by rustls.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

use super::{TlsArgs, TlsError};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
const HTTP_1_1: &[u8] = b"http/1.1";

/// The certificate for new connections.
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Current>,
}

struct Current {
    pem: Pem,
    config: Arc<ServerConfig>,
}

/// Both files, as they were read.
#[derive(PartialEq)]
pub(super) struct Pem {
    pub cert: Vec<u8>,
    pub key: Vec<u8>,
}

impl Tls {
    /// Reads certificate and key; `None`: there is to be none.
    ///
    /// # Errors
    /// A file that cannot be read or is no PEM; a key of another certificate.
    pub fn load(args: &TlsArgs) -> Result<Option<Arc<Self>>, TlsError> {
        let (Some(cert), Some(key)) = (args.tls_cert.clone(), args.tls_key.clone()) else {
            return Ok(None);
        };
        let pem = Pem::read(&cert, &key)?;
        let config = config(&pem, &cert, &key)?;
        let current = RwLock::new(Current { pem, config });
        Ok(Some(Arc::new(Self { cert, key, current })))
    }

    /// The handshake with a client. It has no limit of time of its own.
    ///
    /// # Errors
    /// The client went, or does not speak TLS.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let config = {
            let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(&current.config)
        };
        TlsAcceptor::from(config).accept(stream).await
    }

    /// Takes a certificate that replaces the first one. While its files have an error, the
    /// one before is used.
    pub async fn keep_reading(self: Arc<Self>) -> Infallible {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut logged = String::new();
        loop {
            ticks.tick().await;
            match self.read_again() {
                Ok(is_new) => {
                    if is_new {
                        tracing::info!("a new certificate for https");
                    }
                    logged.clear();
                }
                Err(error) if logged == error.to_string() => {}
                Err(error) => {
                    tracing::warn!(%error, "the certificate for https stays as it was");
                    logged = error.to_string();
                }
            }
        }
    }

    fn read_again(&self) -> Result<bool, TlsError> {
        let pem = Pem::read(&self.cert, &self.key)?;
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        if current.pem == pem {
            return Ok(false);
        }
        drop(current);
        let config = config(&pem, &self.cert, &self.key)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = Current { pem, config };
        Ok(true)
    }
}

const CERT: &str = "--tls-cert";
const KEY: &str = "--tls-key";

impl Pem {
    fn read(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        Ok(Self {
            cert: read(CERT, cert)?,
            key: read(KEY, key)?,
        })
    }
}

fn config(pem: &Pem, cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(
            chain(CERT, cert, &pem.cert)?,
            private_key(KEY, key, &pem.key)?,
        )
        .map_err(|source| TlsError::Pair {
            cert: CERT,
            key: KEY,
            source,
        })?;
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Arc::new(config))
}

pub(super) fn read(option: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| unread(option, path, &error))
}

/// The certificates of a file; one at least.
pub(super) fn chain(
    option: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| unread(option, path, &error))?;
    if chain.is_empty() {
        return Err(unread(option, path, &"it has no certificate"));
    }
    Ok(chain)
}

pub(super) fn private_key(
    option: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => unread(
            option,
            path,
            &"it has no private key, or one with a passphrase: `openssl pkey -in OLD -out NEW` \
              writes it without",
        ),
        error => unread(option, path, &error),
    })
}

pub(super) fn unread(option: &'static str, path: &Path, wrong: &dyn std::fmt::Display) -> TlsError {
    TlsError::Read {
        option,
        path: path.display().to_string(),
        wrong: wrong.to_string(),
    }
}
