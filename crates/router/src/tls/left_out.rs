//! A build without https.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::{TlsArgs, TlsError};

/// There is none.
pub enum Tls {}

impl Tls {
    /// # Errors
    /// [`TlsError::LeftOut`] where a certificate is given.
    pub fn load(args: &TlsArgs) -> Result<Option<Arc<Self>>, TlsError> {
        match args.tls_cert {
            Some(_) => Err(TlsError::LeftOut("--tls-cert")),
            None => Ok(None),
        }
    }

    pub async fn accept(&self, _: TcpStream) -> io::Result<TcpStream> {
        match *self {}
    }

    pub async fn keep_reading(self: Arc<Self>) -> Infallible {
        match *self {}
    }
}
