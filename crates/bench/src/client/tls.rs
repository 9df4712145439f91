//! TLS over a connection, trusting the system's certificates.

use std::io;
use std::sync::Arc;

use tasuki_http1::Io;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Makes connections secret. Cheap to clone.
#[derive(Clone)]
pub struct Tls(TlsConnector);

impl Tls {
    /// Loads the system's certificates.
    pub fn new() -> Self {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// # Errors
    /// `host` is not the server's name, by its certificate, or the connection breaks.
    pub async fn connect(self, host: String, stream: TcpStream) -> io::Result<Box<dyn Io>> {
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        Ok(Box::new(self.0.connect(name, stream).await?))
    }
}
