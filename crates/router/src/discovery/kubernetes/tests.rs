//! What an API server may do to a watch.

use std::time::Duration;

use axum::http::StatusCode;
use futures::StreamExt;

use super::super::tests::set;
use super::testing::{ApiServer, endpoint, slice};
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::workers::testing::{soon, until};

const NEVER: Duration = Duration::from_secs(3_600);

fn one(name: &str, host: &str) -> EndpointSlice {
    slice(name, "IPv4", &[("grpc", 7001)], &[endpoint(host)])
}

async fn next(sets: &mut BoxStream<'static, AddressSet>) -> AddressSet {
    soon("a set", sets.next()).await.expect("it never ends")
}

#[tokio::test]
async fn a_broken_watch_and_one_that_is_too_old_are_made_again() {
    let server = ApiServer::start().await;
    server.apply(one("a", "10.0.0.1"));
    let mut sets = Box::new(server.source(NEVER)).watch();
    assert_eq!(next(&mut sets).await, set(&["10.0.0.1:7001"]));
    let follow = async |sets: &mut BoxStream<'static, AddressSet>, host: &str| {
        server.apply(one("a", host));
        assert_eq!(next(sets).await, set(&[&format!("{host}:7001")]));
    };
    follow(&mut sets, "10.0.0.2").await;
    server.drop_watches(false);
    follow(&mut sets, "10.0.0.3").await;
    let lists = server.lists();
    server.drop_watches(true);
    follow(&mut sets, "10.0.0.4").await;
    assert!(server.lists() > lists, "410 Gone calls for a full list");
    let of_service = "kubernetes.io/service-name=workers";
    assert_eq!(
        server.selectors(),
        [of_service],
        "nothing else is asked for"
    );
}

#[tokio::test]
async fn a_missed_deletion_is_found_by_the_next_list() {
    let server = ApiServer::start().await;
    server.apply(one("a", "10.0.0.1"));
    server.apply(one("b", "10.0.0.2"));
    let mut sets = Box::new(server.source(Duration::from_millis(50))).watch();
    assert_eq!(next(&mut sets).await.len(), 2);
    server.delete_silently("b");
    assert_eq!(next(&mut sets).await, set(&["10.0.0.1:7001"]));
}

#[tokio::test]
async fn a_refused_router_is_told_what_it_may_lack() {
    let (lines, _guard) = Lines::keep("warn", AccessLog::Off);
    let server = ApiServer::start().await;
    server.set_fault(Some(StatusCode::FORBIDDEN));
    let mut sets = Box::new(server.source(NEVER)).watch();
    tokio::select! {
        set = sets.next() => panic!("a refusal is no set: {set:?}"),
        () = until("the log", || lines.text().contains("endpointslices")) => {}
    }
    let text = lines.text();
    assert!(
        text.contains("kubernetes:ml/workers") && text.contains("403"),
        "{text}"
    );
    server.set_fault(None);
    assert_eq!(
        next(&mut sets).await,
        set(&[]),
        "a Service without endpoints"
    );
}
