//! The port of operators, on 127.0.0.1 only: the admin API, the dashboard, and SGLang's paths that
//! are not for clients. It has no authentication. So that web pages which a browser on this
//! machine shows cannot use it, requests of such pages are refused.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};

use crate::app::App;
use crate::foreign::native;
use crate::{admin, dashboard};

/// Everything that operators are served.
pub fn routes(source: dashboard::Source, app: Arc<App>) -> Router {
    admin::routes(Arc::clone(&source.registry))
        .merge(dashboard::routes(source))
        .merge(native::for_operators(app))
        .layer(from_fn(refuse_web_pages))
}

async fn refuse_web_pages(request: Request, next: Next) -> Response {
    match refusal(request.headers()) {
        None => next.run(request).await,
        Some(message) => {
            let body = serde_json::json!({"error": {"message": message}});
            (StatusCode::FORBIDDEN, Json(body)).into_response()
        }
    }
}

/// Why a request is refused. Browsers name the origin of a page that sends to another site. A page
/// whose own name was made to lead here (DNS rebinding) is known by that name.
fn refusal(headers: &HeaderMap) -> Option<&'static str> {
    if headers.contains_key(header::ORIGIN) {
        return Some("requests with an Origin header come from web pages and are refused here");
    }
    let named = headers.get(header::HOST).is_some_and(|host| !is_here(host));
    named.then_some("the Host header is neither localhost nor an IP address: use one of these")
}

/// Whether no DNS server decides where the name leads.
fn is_here(host: &HeaderValue) -> bool {
    let authority = host.to_str().ok().and_then(|host| host.parse().ok());
    authority.is_some_and(|authority: Authority| {
        let host = authority.host().trim_matches(['[', ']']);
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;
    use crate::metrics::Metrics;
    use crate::testing::{FakeGenerator, app};
    use crate::workers::testing::registry;

    fn served() -> Router {
        let registry = registry(1);
        let metrics = Arc::new(Metrics::new(&registry));
        let source = dashboard::Source { registry, metrics };
        routes(source, app(Arc::new(FakeGenerator::saying(""))))
    }

    async fn status(method: &str, path: &str, name: &str, value: &str) -> StatusCode {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(name, value).body(Body::empty());
        let answer = served().oneshot(request.expect("a request")).await;
        answer.expect("an answer").status()
    }

    const PATHS: [(&str, &str); 5] = [
        ("GET", "/workers"),
        ("POST", "/workers/0/drain"),
        ("GET", "/dashboard/state"),
        ("POST", "/flush_cache"),
        ("GET", "/nowhere"),
    ];

    #[tokio::test]
    async fn web_pages_are_refused_on_every_path() {
        for (method, path) in PATHS {
            for (name, value) in [
                ("origin", "https://a.example"),
                ("origin", "null"),
                ("host", "a.example:9901"),
                ("host", "localhost.a.example"),
                ("host", "127.0.0.1.a.example:9901"),
                ("host", "@"),
            ] {
                let answered = status(method, path, name, value).await;
                assert_eq!(answered, StatusCode::FORBIDDEN, "{path} {name}: {value}");
            }
        }
    }

    #[tokio::test]
    async fn whoever_names_this_machine_is_served() {
        for host in [
            "127.0.0.1:9901",
            "localhost:9901",
            "LOCALHOST",
            "[::1]:9901",
        ] {
            for (method, path) in PATHS {
                let answered = status(method, path, "host", host).await;
                let expected = match path {
                    "/nowhere" => StatusCode::NOT_FOUND,
                    _ => StatusCode::OK,
                };
                assert_eq!(answered, expected, "{path} {host}");
            }
        }
    }
}
