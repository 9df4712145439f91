//! Connections: TCP without Nagle's delay, with TLS for https (feature `tls`).

use std::io;

use futures::future::BoxFuture;
use tasuki_http1::Io;
use tokio::net::TcpStream;

use super::target::Target;
#[cfg(feature = "tls")]
use super::tls::Tls;

/// Opens connections to one server.
pub trait Transport: Send + Sync {
    fn connect(&self) -> BoxFuture<'static, io::Result<Box<dyn Io>>>;
}

/// Connections over the network.
pub struct Network {
    target: Target,
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
}

impl Network {
    /// Loads the system's certificates if the target wants TLS.
    pub fn new(target: Target) -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: target.tls.then(Tls::new),
            target,
        }
    }
}

impl Transport for Network {
    fn connect(&self) -> BoxFuture<'static, io::Result<Box<dyn Io>>> {
        let target = self.target.clone();
        #[cfg(feature = "tls")]
        let tls = self.tls.clone();
        Box::pin(async move {
            let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
            stream.set_nodelay(true)?;
            #[cfg(feature = "tls")]
            if let Some(tls) = tls {
                return tls.connect(target.host, stream).await;
            }
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}
