//! How a worker is named: `HOST:PORT` is one of ours, a URL one of another engine.

use std::fmt;

use axum::http::Uri;
use axum::http::uri::Authority;
use tasuki_core::Role;

/// Of SGLang, unless the URL says another one.
const BOOTSTRAP_PORT: u16 = 8998;

/// A worker's address, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Ours, by gRPC.
    Tasuki(String),
    Foreign(ForeignAddress),
}

/// A worker of another engine, by HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignAddress {
    pub engine: Engine,
    /// HOST:PORT.
    pub authority: String,
    pub role: Role,
    /// Where SGLang's decode workers reach a prefill worker.
    pub bootstrap_port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    Vllm,
    Sglang,
}

impl Engine {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
        })
    }
}

impl ForeignAddress {
    pub fn host(&self) -> &str {
        let (host, _) = self
            .authority
            .rsplit_once(':')
            .unwrap_or((&self.authority, ""));
        host
    }
}

/// What is wrong with a worker's address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAnAddress {
    #[error(
        "it must be HOST:PORT, such as 127.0.0.1:9000 or [::1]:9000, for a Tasuki worker, or \
         vllm://HOST:PORT or sglang://HOST:PORT"
    )]
    HostPort,
    #[error("{0}:// is no kind of worker: it must be vllm:// or sglang://, or HOST:PORT alone")]
    Scheme(String),
    #[error("a worker's URL has no path, and this has {0:?}: it must end after the port")]
    Path(String),
    #[error("{name} is no parameter of {engine} workers: there are {known}")]
    Parameter {
        name: String,
        engine: Engine,
        known: &'static str,
    },
    #[error("role is {0:?}: it must be prefill or decode, or be left out of a worker for both")]
    Role(String),
    #[error("bootstrap_port is {0:?}: it must be a port, 1 to 65535")]
    BootstrapPort(String),
}

impl Address {
    /// # Errors
    ///
    /// [`NotAnAddress`]: what is wrong with it.
    pub fn parse(given: &str) -> Result<Self, NotAnAddress> {
        let Some((scheme, rest)) = given.split_once("://") else {
            return Ok(Self::Tasuki(host_port(given)?.to_owned()));
        };
        let engine = match scheme {
            "vllm" => Engine::Vllm,
            "sglang" => Engine::Sglang,
            _ => return Err(NotAnAddress::Scheme(scheme.chars().take(20).collect())),
        };
        let (authority, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = authority.split_at(authority.find('/').unwrap_or(authority.len()));
        if !matches!(path, "" | "/") {
            return Err(NotAnAddress::Path(path.chars().take(40).collect()));
        }
        let mut address = ForeignAddress {
            engine,
            authority: host_port(authority)?.to_owned(),
            role: Role::Mixed,
            bootstrap_port: BOOTSTRAP_PORT,
        };
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            address.set(parameter)?;
        }
        Ok(Self::Foreign(address))
    }
}

impl ForeignAddress {
    fn set(&mut self, parameter: &str) -> Result<(), NotAnAddress> {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match (name, self.engine) {
            ("role", _) => {
                self.role = match value {
                    "prefill" => Role::Prefill,
                    "decode" => Role::Decode,
                    _ => return Err(NotAnAddress::Role(value.to_owned())),
                };
            }
            ("bootstrap_port", Engine::Sglang) => {
                let port = value.parse().ok().filter(|port| *port != 0);
                self.bootstrap_port =
                    port.ok_or_else(|| NotAnAddress::BootstrapPort(value.to_owned()))?;
            }
            _ => {
                return Err(NotAnAddress::Parameter {
                    name: name.to_owned(),
                    engine: self.engine,
                    known: match self.engine {
                        Engine::Vllm => "role",
                        Engine::Sglang => "role and bootstrap_port",
                    },
                });
            }
        }
        Ok(())
    }
}

fn host_port(given: &str) -> Result<&str, NotAnAddress> {
    let uri = given.parse::<Uri>().ok();
    let authority = given.parse::<Authority>().ok();
    let authority = authority.filter(|a| !a.host().is_empty() && !given.contains('@'));
    match authority.and_then(|authority| authority.port_u16()) {
        Some(1..) if uri.is_some() => Ok(given),
        _ => Err(NotAnAddress::HostPort),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_have_a_host_and_a_port() {
        for good in ["a:1", "10.0.0.1:65535", "[::1]:9000", "w-0.workers.svc:80"] {
            assert_eq!(Address::parse(good), Ok(Address::Tasuki(good.to_owned())));
        }
        for bad in [
            "", "a", ":1", "a:0", "a:65536", "a:b", "::1:9", "a b:1", "u@a:1", "a/b:1",
        ] {
            assert_eq!(Address::parse(bad), Err(NotAnAddress::HostPort), "{bad}");
        }
    }

    #[test]
    fn those_of_other_engines_are_urls() {
        let foreign = |given| match Address::parse(given) {
            Ok(Address::Foreign(address)) => address,
            other => panic!("{given}: {other:?}"),
        };
        let decode = foreign("vllm://10.0.0.1:8000/?role=decode");
        assert_eq!((decode.engine, decode.role), (Engine::Vllm, Role::Decode));
        assert_eq!(decode.authority, "10.0.0.1:8000");
        let prefill = foreign("sglang://[::1]:30000?role=prefill&bootstrap_port=9001");
        assert_eq!((prefill.host(), prefill.bootstrap_port), ("[::1]", 9001));
        assert_eq!(foreign("sglang://a:1").bootstrap_port, 8998);
        assert_eq!(foreign("vllm://a:1").role, Role::Mixed);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (bad, says) in [
            ("http://a:1", "http:// is no kind of worker"),
            ("vllm://a", "HOST:PORT"),
            ("vllm://u@a:1", "HOST:PORT"),
            ("vllm://a:1/v1", "\"/v1\""),
            ("vllm://a:1?role=both", "role is \"both\""),
            (
                "vllm://a:1?bootstrap_port=1",
                "bootstrap_port is no parameter of vLLM",
            ),
            ("sglang://a:1?bootstrap_port=0", "bootstrap_port is \"0\""),
            ("sglang://a:1?rank=1", "there are role and bootstrap_port"),
        ] {
            let error = Address::parse(bad).expect_err(bad).to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
