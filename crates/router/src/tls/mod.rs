//! https for clients: the certificate of the router, read again when its files change. And mTLS
//! with workers ([`fleet`]).

#[cfg_attr(feature = "tls", path = "rustls.rs")]
#[cfg_attr(not(feature = "tls"), path = "left_out.rs")]
mod build;
pub mod fleet;
#[cfg(all(test, feature = "tls"))]
mod tests;

use std::path::PathBuf;

use clap::Args;

pub use self::build::Tls;

/// Options of the command line.
#[derive(Debug, Clone, Default, Args)]
pub struct TlsArgs {
    /// Certificate chain in PEM. With it and --tls-key clients are served over https alone. Both
    /// files are read again when they change.
    #[arg(long, value_name = "PATH", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key in PEM, of --tls-cert.
    #[arg(long, value_name = "PATH", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[cfg(not(feature = "tls"))]
    #[error(
        "{0} requires the feature `tls`, which this build leaves out: `make setup FEATURES=tls` \
         adds it"
    )]
    LeftOut(&'static str),
    #[cfg(feature = "tls")]
    #[error("{option} {path} cannot be read: {wrong}")]
    Read {
        option: &'static str,
        path: String,
        wrong: String,
    },
    #[cfg(feature = "tls")]
    #[error("{cert} and {key} do not fit together: {source}")]
    Pair {
        cert: &'static str,
        key: &'static str,
        source: tokio_rustls::rustls::Error,
    },
}
