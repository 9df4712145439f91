//! mTLS with our workers: both sides show a certificate of the fleet's CA.
//!
//! Workers move, so a certificate is for no address. Each has the DNS name `tasuki`, and
//! the processes of a fleet may share one.

#[cfg_attr(feature = "tls", path = "rustls.rs")]
#[cfg_attr(not(feature = "tls"), path = "left_out.rs")]
mod build;
#[cfg(all(test, feature = "tls"))]
mod tests;

use std::error::Error;
use std::io::ErrorKind;
use std::path::PathBuf;

use clap::Args;
use tonic::transport::Endpoint;

pub use self::build::FleetTls;
use super::TlsError;

/// The DNS name that every certificate of a fleet has.
#[cfg(feature = "tls")]
pub const FLEET_NAME: &str = "tasuki";

/// Options of the command line.
#[derive(Debug, Clone, Default, Args)]
pub struct FleetArgs {
    /// Certificate chain in PEM that the router shows to workers; it has the DNS name tasuki. With
    /// it, --fleet-key and --fleet-ca the router speaks to workers by mTLS alone. The files are
    /// read again for each new connection. vLLM and SGLang workers stay on plain http.
    #[arg(
        long,
        value_name = "PATH",
        requires = "fleet_key",
        requires = "fleet_ca"
    )]
    pub fleet_cert: Option<PathBuf>,

    /// Private key in PEM, of --fleet-cert.
    #[arg(
        long,
        value_name = "PATH",
        requires = "fleet_cert",
        requires = "fleet_ca"
    )]
    pub fleet_key: Option<PathBuf>,

    /// Certificates in PEM of the CA that every worker's certificate must come from.
    #[arg(
        long,
        value_name = "PATH",
        requires = "fleet_cert",
        requires = "fleet_key"
    )]
    pub fleet_ca: Option<PathBuf>,
}

/// How the router speaks to its own workers.
#[derive(Debug, Clone, Default)]
pub enum WorkerTransport {
    #[default]
    Plain,
    Secure(FleetTls),
}

impl WorkerTransport {
    /// Reads the certificates once, so that an error in them ends the start.
    ///
    /// # Errors
    /// A file that cannot be read or is no PEM; a key of another certificate; a build without TLS.
    pub fn load(args: &FleetArgs) -> Result<Self, TlsError> {
        match (&args.fleet_cert, &args.fleet_key, &args.fleet_ca) {
            (Some(cert), Some(key), Some(ca)) => {
                FleetTls::load(cert.clone(), key.clone(), ca.clone()).map(Self::Secure)
            }
            _ => Ok(Self::Plain),
        }
    }

    /// Where a worker is, with the certificates as they are now.
    ///
    /// # Errors
    /// As [`Self::load`]; an address that is none.
    pub fn endpoint(&self, address: &str) -> Result<Endpoint, EndpointError> {
        match self {
            Self::Plain => Ok(Endpoint::from_shared(format!("http://{address}"))?),
            Self::Secure(fleet) => {
                let endpoint = Endpoint::from_shared(format!("https://{address}"))?;
                fleet.secure(endpoint)
            }
        }
    }

    /// What to do where the two sides do not understand one another.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Plain => {
                "if the worker was started with --fleet-cert, start the router with --fleet-cert, \
                 --fleet-key and --fleet-ca too"
            }
            Self::Secure(_) => {
                "router and worker each need --fleet-cert, --fleet-key and --fleet-ca, with \
                 certificates that are valid now, have the DNS name tasuki and come from the \
                 other's --fleet-ca"
            }
        }
    }
}

/// Why there is no endpoint.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error(transparent)]
    Certificates(#[from] TlsError),
    #[error(transparent)]
    Transport(#[from] tonic::transport::Error),
}

/// Whether a connection ended as it does where one side speaks TLS and the other does not, or
/// one does not trust the other: it was made, and then broken.
pub fn is_misunderstanding(error: &(dyn Error + 'static)) -> bool {
    let kinds = [
        ErrorKind::InvalidData,
        ErrorKind::UnexpectedEof,
        ErrorKind::ConnectionReset,
        ErrorKind::BrokenPipe,
    ];
    causes(error).any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>();
        cause.is::<hyper::Error>() || io.is_some_and(|io| kinds.contains(&io.kind()))
    })
}

/// An error and what it comes from.
pub fn causes<'e>(
    error: &'e (dyn Error + 'static),
) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}
