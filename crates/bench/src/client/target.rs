//! Where requests go: the parts of a base URL.

use hyper::Uri;
use hyper::header::HeaderValue;

use crate::plan::Api;

/// Why a URL cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--base-url {url}: {reason}; give one like http://127.0.0.1:8000")]
pub struct TargetError {
    url: String,
    reason: String,
}

/// A server, as its base URL names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub host: String,
    pub port: u16,
    pub tls: bool,
    /// The value of the `Host` header.
    pub authority: String,
    /// Before every path, without a slash at its end.
    prefix: String,
}

impl Target {
    /// # Errors
    /// What is wrong with `url`.
    pub fn parse(url: &str) -> Result<Self, TargetError> {
        Self::parse_in_build(url, cfg!(feature = "tls"))
    }

    fn parse_in_build(url: &str, has_tls: bool) -> Result<Self, TargetError> {
        let fail = |reason: &str| TargetError {
            url: url.to_owned(),
            reason: reason.to_owned(),
        };
        let uri: Uri = url.parse().map_err(|_| fail("it is no URL"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") if has_tls => true,
            Some("https") => {
                return Err(fail(
                    "https requires the feature `tls`, which this build leaves out: \
                     `make setup FEATURES=tls` adds it",
                ));
            }
            _ => return Err(fail("it begins with neither http:// nor https://")),
        };
        let host = uri.host().ok_or_else(|| fail("it names no host"))?;
        let authority = uri.authority().map_or("", |a| a.as_str());
        if let Some((user, host)) = authority.rsplit_once('@') {
            return Err(TargetError {
                url: url.replacen(&format!("{user}@{host}"), &format!("***@{host}"), 1),
                reason: "the user in it would not be sent: use --api-key or --header".to_owned(),
            });
        }
        HeaderValue::from_str(authority).map_err(|_| fail("its host has odd characters"))?;
        // A base URL is often given with the version in it.
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            tls,
            authority: authority.to_owned(),
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
        })
    }

    /// `path` below the base URL.
    pub fn path(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }

    /// Host and port, for messages.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// The path of an API, as OpenAI has it.
pub fn api_path(api: Api) -> &'static str {
    match api {
        Api::Completions => "/v1/completions",
        Api::Chat => "/v1/chat/completions",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_in_their_many_forms() {
        for (url, port, tls, path) in [
            ("http://127.0.0.1:8000", 8000, false, "/v1/models"),
            ("http://a.b/v1/", 80, false, "/v1/models"),
            ("https://a.b/openai/v1", 443, true, "/openai/v1/models"),
        ] {
            let target = Target::parse_in_build(url, true).unwrap();
            assert_eq!((target.port, target.tls), (port, tls), "{url}");
            assert_eq!(target.path("/v1/models"), path, "{url}");
        }
        let six = Target::parse("http://[::1]:9").unwrap();
        assert_eq!(
            (six.host.as_str(), six.authority.as_str()),
            ("::1", "[::1]:9")
        );
        for bad in ["127.0.0.1:8000", "ftp://a", "", "http://"] {
            let error = Target::parse(bad).unwrap_err().to_string();
            assert!(error.contains("http://127.0.0.1:8000"), "{error}");
        }
    }

    #[test]
    fn a_user_in_a_url_is_refused_and_not_repeated() {
        let error = Target::parse("http://me:secret@a.b:1/v1").unwrap_err();
        let said = error.to_string();
        assert!(
            said.starts_with("--base-url http://***@a.b:1/v1: "),
            "{said}"
        );
        assert!(
            said.contains("--api-key") && !said.contains("secret"),
            "{said}"
        );
    }

    #[test]
    fn a_build_without_tls_names_the_feature() {
        assert!(Target::parse_in_build("http://a.b", false).is_ok());
        let error = Target::parse_in_build("https://a.b", false).unwrap_err();
        assert!(error.to_string().contains("FEATURES=tls"), "{error}");
    }
}
