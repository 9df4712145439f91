//! A build without mTLS.

use std::path::PathBuf;

use tonic::transport::Endpoint;

use super::super::TlsError;
use super::EndpointError;

/// There is none.
#[derive(Debug, Clone)]
pub enum FleetTls {}

impl FleetTls {
    /// # Errors
    /// [`TlsError::LeftOut`].
    pub fn load(_: PathBuf, _: PathBuf, _: PathBuf) -> Result<Self, TlsError> {
        Err(TlsError::LeftOut("--fleet-cert"))
    }

    pub fn secure(&self, _: Endpoint) -> Result<Endpoint, EndpointError> {
        match *self {}
    }
}
