//! A scripted API server: it has EndpointSlices, tells of their changes or not, and fails.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Client, Config};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::{EndpointSlices, Timing};
use crate::discovery::source::Service;

pub const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices";

pub fn endpoint(host: &str) -> Endpoint {
    Endpoint {
        addresses: vec![host.to_owned()],
        ..Endpoint::default()
    }
}

pub fn slice(
    name: &str,
    family: &str,
    ports: &[(&str, i32)],
    endpoints: &[Endpoint],
) -> EndpointSlice {
    let port = |(name, port): &(&str, i32)| EndpointPort {
        name: Some((*name).to_owned()),
        port: Some(*port),
        ..EndpointPort::default()
    };
    EndpointSlice {
        address_type: family.to_owned(),
        endpoints: endpoints.to_vec(),
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some("ml".to_owned()),
            ..ObjectMeta::default()
        },
        ports: Some(ports.iter().map(port).collect()),
    }
}

#[derive(Default)]
struct Cluster {
    version: u64,
    slices: Vec<(u64, EndpointSlice)>,
    /// What watches are told, by version: one that begins late is told what it has missed.
    events: Vec<(u64, Value)>,
    watches: Vec<UnboundedSender<Value>>,
    /// Every request is answered with this.
    fault: Option<StatusCode>,
    lists: usize,
    selectors: Vec<String>,
}

/// One API server on a port of its own; it ends with the test's runtime.
#[derive(Clone)]
pub struct ApiServer {
    cluster: Arc<Mutex<Cluster>>,
    url: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Parameters {
    watch: Option<String>,
    label_selector: Option<String>,
    resource_version: Option<String>,
}

impl ApiServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let cluster = Arc::default();
        let routes = Router::new().route(PATH, get(answer));
        let routes = routes.with_state(Arc::clone(&cluster));
        tokio::spawn(axum::serve(listener, routes).into_future());
        Self { cluster, url }
    }

    /// A source that asks this server for `ml/workers`.
    pub fn source(&self, relist: Duration) -> EndpointSlices {
        let service = Service {
            namespace: Some("ml".to_owned()),
            name: "workers".to_owned(),
            port: None,
        };
        let timing = Timing {
            relist,
            first_pause: Duration::from_millis(1),
            longest_pause: Duration::from_millis(10),
        };
        let url = self.url.clone();
        let connect = move || {
            let config = Config::new(url.parse().expect("a URL"));
            async { Client::try_from(config) }.boxed()
        };
        EndpointSlices::asked(service, timing, Box::new(connect))
    }

    /// Adds or replaces a slice.
    pub fn apply(&self, slice: EndpointSlice) {
        let kind = self.change(|slices| {
            let known = slices.len();
            slices.retain(|(_, each)| each.metadata.name != slice.metadata.name);
            let kind = if slices.len() == known {
                "ADDED"
            } else {
                "MODIFIED"
            };
            (kind, slice.clone())
        });
        self.tell(&kind);
    }

    /// Deletes a slice, and no watch hears of it.
    pub fn delete_silently(&self, name: &str) {
        let mut cluster = self.cluster.lock().expect("a lock");
        cluster.version += 1;
        let known = cluster.slices.len();
        let is_other = |slice: &EndpointSlice| slice.metadata.name.as_deref() != Some(name);
        cluster.slices.retain(|(_, each)| is_other(each));
        assert_eq!(cluster.slices.len(), known - 1, "the slice was there");
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Vec<(u64, EndpointSlice)>) -> (&'static str, EndpointSlice),
    ) -> Value {
        let mut cluster = self.cluster.lock().expect("a lock");
        cluster.version += 1;
        let version = cluster.version;
        let (kind, slice) = change(&mut cluster.slices);
        cluster.slices.push((version, slice.clone()));
        let event = json!({"type": kind, "object": object(&slice, version)});
        cluster.events.push((version, event.clone()));
        event
    }

    fn tell(&self, event: &Value) {
        let mut cluster = self.cluster.lock().expect("a lock");
        cluster
            .watches
            .retain(|watch| watch.send(event.clone()).is_ok());
    }

    /// Ends every watch: with an error of the API, or like a connection that broke.
    pub fn drop_watches(&self, gone: bool) {
        if gone {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                "status": "Failure", "message": "too old resource version", "reason": "Expired",
                "code": 410});
            self.tell(&json!({"type": "ERROR", "object": status}));
        }
        self.cluster.lock().expect("a lock").watches.clear();
    }

    /// From now on every request fails, those that run included; `None`: none does.
    pub fn set_fault(&self, fault: Option<StatusCode>) {
        let mut cluster = self.cluster.lock().expect("a lock");
        cluster.fault = fault;
        cluster.watches.clear();
    }

    pub fn lists(&self) -> usize {
        self.cluster.lock().expect("a lock").lists
    }

    /// The label selectors that were asked for, each once.
    pub fn selectors(&self) -> Vec<String> {
        let mut selectors = self.cluster.lock().expect("a lock").selectors.clone();
        selectors.sort();
        selectors.dedup();
        selectors
    }
}

fn object(slice: &EndpointSlice, version: u64) -> Value {
    let mut object = serde_json::to_value(slice).expect("JSON");
    object["metadata"]["resourceVersion"] = json!(version.to_string());
    object
}

async fn answer(
    State(cluster): State<Arc<Mutex<Cluster>>>,
    Query(asked): Query<Parameters>,
) -> Response {
    let mut cluster = cluster.lock().expect("a lock");
    cluster.selectors.extend(asked.label_selector);
    if let Some(fault) = cluster.fault {
        return (fault, "the API server is ill").into_response();
    }
    if asked.watch.is_none_or(|watch| watch == "false") {
        cluster.lists += 1;
        let slices = cluster.slices.iter();
        let items: Vec<Value> = slices
            .map(|(version, each)| object(each, *version))
            .collect();
        let metadata = json!({"resourceVersion": cluster.version.to_string()});
        let list = json!({"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
            "metadata": metadata, "items": items});
        return axum::Json(list).into_response();
    }
    let (sender, events) = unbounded_channel();
    let known = asked.resource_version.as_deref().unwrap_or_default();
    let known: u64 = known.parse().unwrap_or_default();
    for (_, event) in cluster
        .events
        .iter()
        .filter(|(version, _)| *version > known)
    {
        let _ = sender.send(event.clone());
    }
    cluster.watches.push(sender);
    let lines = UnboundedReceiverStream::new(events);
    let lines = lines.map(|event: Value| Ok::<_, Infallible>(format!("{event}\n")));
    Response::new(Body::from_stream(lines))
}
