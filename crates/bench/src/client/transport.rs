//! Connections: TCP without Nagle's delay, with TLS for https.

use std::io;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::target::Target;

/// A connection's two directions.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Opens connections to one server.
pub trait Transport: Send + Sync {
    fn connect(&self) -> BoxFuture<'static, io::Result<Box<dyn Io>>>;
}

/// Connections over the network.
pub struct Network {
    target: Target,
    tls: Option<TlsConnector>,
}

impl Network {
    /// Loads the system's certificates if the target wants TLS.
    pub fn new(target: Target) -> Self {
        let tls = target.tls.then(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            let config = ClientConfig::builder()
                .with_root_certificates(roots)
                .with_no_client_auth();
            TlsConnector::from(Arc::new(config))
        });
        Self { target, tls }
    }
}

impl Transport for Network {
    fn connect(&self) -> BoxFuture<'static, io::Result<Box<dyn Io>>> {
        let target = self.target.clone();
        let tls = self.tls.clone();
        Box::pin(async move {
            let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
            stream.set_nodelay(true)?;
            let Some(tls) = tls else {
                return Ok(Box::new(stream) as Box<dyn Io>);
            };
            let name = ServerName::try_from(target.host).map_err(io::Error::other)?;
            Ok(Box::new(tls.connect(name, stream).await?) as Box<dyn Io>)
        })
    }
}
