//! What `--discover` says: where the workers' addresses come from.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

#[cfg(feature = "kubernetes")]
use super::kubernetes::EndpointSlices;
use super::{AddressSet, Discovery, Dns, NotAnAddress, StaticList, WatchedFile, address};

/// DNS labels, and so the names of Services and namespaces.
const MAX_LABEL: usize = 63;

/// A source whose addresses change while the router runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    File(PathBuf),
    /// HOST:PORT, or a URL with such a name.
    Dns(String),
    Kubernetes(Service),
}

/// A Kubernetes Service whose endpoints are workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// `None`: that of the router's own pod, or of the current context.
    pub namespace: Option<String>,
    pub name: String,
    /// `None`: every port is a worker.
    pub port: Option<String>,
}

/// What is wrong with a `--discover`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotASource {
    #[error(
        "it must be file:PATH, dns:HOST:PORT or kubernetes:[NAMESPACE/]SERVICE[:PORTNAME]; a list \
         of addresses is given with --worker"
    )]
    Kind,
    #[error("file: needs a path behind it, such as file:/run/workers")]
    Path,
    #[error("dns: {0}")]
    Name(#[from] NotAnAddress),
    #[error(
        "{0:?} is no name in Kubernetes: it must be 1 to {MAX_LABEL} of a-z, 0-9 and -, in the \
         form [NAMESPACE/]SERVICE[:PORTNAME]"
    )]
    Service(String),
    #[error(
        "this build has no discovery by Kubernetes: build the router with the feature \
         `kubernetes` (make setup FEATURES=kubernetes), or use dns:SERVICE:PORT with a headless \
         Service"
    )]
    LeftOut,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Dns(name) => write!(f, "dns:{name}"),
            Self::Kubernetes(service) => write!(f, "kubernetes:{service}"),
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.name)?;
        match &self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Source {
    type Err = NotASource;

    fn from_str(given: &str) -> Result<Self, NotASource> {
        let (kind, rest) = given.split_once(':').ok_or(NotASource::Kind)?;
        match kind {
            "file" if rest.is_empty() => Err(NotASource::Path),
            "file" => Ok(Self::File(rest.into())),
            "dns" => Ok(Self::Dns(address(rest)?)),
            "kubernetes" => {
                let service = service(rest)?;
                let is_built = cfg!(feature = "kubernetes");
                is_built
                    .then_some(Self::Kubernetes(service))
                    .ok_or(NotASource::LeftOut)
            }
            _ => Err(NotASource::Kind),
        }
    }
}

fn service(given: &str) -> Result<Service, NotASource> {
    let (namespace, rest) = match given.split_once('/') {
        Some((namespace, rest)) => (Some(namespace), rest),
        None => (None, given),
    };
    let (name, port) = match rest.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (rest, None),
    };
    let mut names = [namespace, Some(name), port].into_iter().flatten();
    match names.find(|name| !is_label(name)) {
        Some(bad) => Err(NotASource::Service(bad.chars().take(80).collect())),
        None => Ok(Service {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            port: port.map(str::to_owned),
        }),
    }
}

fn is_label(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty()
        && name.len() <= MAX_LABEL
        && name.chars().all(allowed)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// What an operator configured.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    pub list: AddressSet,
    pub discover: Vec<Source>,
    pub dns_interval: Duration,
}

impl Sources {
    pub fn open(&self) -> Vec<Box<dyn Discovery>> {
        let list: Box<dyn Discovery> = Box::new(StaticList(self.list.clone()));
        let others = self.discover.iter().map(|source| self.open_one(source));
        std::iter::once(list).chain(others).collect()
    }

    fn open_one(&self, source: &Source) -> Box<dyn Discovery> {
        match source.clone() {
            Source::File(path) => Box::new(WatchedFile::new(path)),
            Source::Dns(name) => Box::new(Dns::new(name, self.dns_interval)),
            #[cfg(feature = "kubernetes")]
            Source::Kubernetes(service) => Box::new(EndpointSlices::new(service)),
            // Refused where it is read.
            #[cfg(not(feature = "kubernetes"))]
            Source::Kubernetes(_) => Box::new(StaticList(AddressSet::new())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_read_and_written() {
        let files = ["file:w.txt", "file:/run/a:b"];
        let names = ["dns:workers:9000", "dns:vllm://workers:8000?role=decode"];
        for text in files.into_iter().chain(names) {
            assert_eq!(text.parse::<Source>().expect(text).to_string(), text);
        }
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn a_service_has_a_namespace_and_a_port_if_they_are_given() {
        for text in [
            "kubernetes:workers",
            "kubernetes:ml/workers",
            "kubernetes:ml/workers:grpc",
        ] {
            assert_eq!(text.parse::<Source>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn names_of_kubernetes_are_labels() {
        for bad in ["", "a/", "/a", "a:", "A", "a/b/c", "a:b:c", "-a", "a b"] {
            let refused = format!("kubernetes:{bad}").parse::<Source>();
            assert!(matches!(refused, Err(NotASource::Service(_))), "{bad}");
        }
        let long = format!("kubernetes:{}", "a".repeat(MAX_LABEL + 1));
        assert!(long.parse::<Source>().is_err());
    }

    #[cfg(not(feature = "kubernetes"))]
    #[test]
    fn a_build_without_kubernetes_says_so() {
        let refused = "kubernetes:workers".parse::<Source>().expect_err("refused");
        assert!(refused.to_string().contains("feature `kubernetes`"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (bad, says) in [
            ("workers.txt", "file:PATH"),
            ("etcd:workers", "file:PATH"),
            ("file:", "needs a path"),
            ("dns:workers", "HOST:PORT"),
        ] {
            let error = bad.parse::<Source>().expect_err(bad).to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
