//! A build with mTLS, by rustls.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::super::TlsError;
use super::super::build::{Pem, chain, private_key, read, unread};
use super::{EndpointError, FLEET_NAME};

const CERT: &str = "--fleet-cert";
const KEY: &str = "--fleet-key";
const CA: &str = "--fleet-ca";

/// Where the certificates are. They are read for every connection, so new ones need no restart.
#[derive(Debug, Clone)]
pub struct FleetTls(Arc<Files>);

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

impl FleetTls {
    /// # Errors
    /// See [`super::WorkerTransport::load`].
    pub fn load(cert: PathBuf, key: PathBuf, ca: PathBuf) -> Result<Self, TlsError> {
        let fleet = Self(Arc::new(Files { cert, key, ca }));
        fleet.read()?;
        Ok(fleet)
    }

    /// # Errors
    /// The files have an error by now.
    pub fn secure(&self, endpoint: Endpoint) -> Result<Endpoint, EndpointError> {
        let (own, ca) = self.read()?;
        let tls = ClientTlsConfig::new()
            .identity(Identity::from_pem(own.cert, own.key))
            .ca_certificate(Certificate::from_pem(ca))
            .domain_name(FLEET_NAME);
        Ok(endpoint.tls_config(tls)?)
    }

    /// Our certificate with its key, and the CA's, as they were checked.
    fn read(&self) -> Result<(Pem, Vec<u8>), TlsError> {
        let Files { cert, key, ca } = &*self.0;
        let own = Pem {
            cert: read(CERT, cert)?,
            key: read(KEY, key)?,
        };
        let authority = read(CA, ca)?;
        let mut roots = RootCertStore::empty();
        for root in chain(CA, ca, &authority)? {
            roots.add(root).map_err(|error| unread(CA, ca, &error))?;
        }
        ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                chain(CERT, cert, &own.cert)?,
                private_key(KEY, key, &own.key)?,
            )
            .map_err(|source| TlsError::Pair {
                cert: CERT,
                key: KEY,
                source,
            })?;
        Ok((own, authority))
    }
}
