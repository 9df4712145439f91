//! mTLS by real gRPC connections.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use tasuki_wire::v1::worker_client::WorkerClient;
use tempfile::TempDir;
use tokio::time::timeout;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::{FLEET_NAME, FleetArgs, WorkerTransport, is_misunderstanding};
use crate::workers::testing::{FakeWorker, info};

const LONG: Duration = Duration::from_secs(20);

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
struct Pair(String, String);

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    fn pair(&self, name: &str, end_year: i32) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(end_year, 1, 1);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Pair(cert.pem(), key.serialize_pem())
    }

    async fn worker(&self, pair: &Pair) -> FakeWorker {
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(&pair.0, &pair.1))
            .client_ca_root(Certificate::from_pem(&self.pem));
        let server = Server::builder().tls_config(tls).unwrap();
        FakeWorker::start_on("127.0.0.1:0".parse().unwrap(), server).await
    }
}

fn files(folder: &Path, ca: &Authority, pair: &Pair) -> FleetArgs {
    let write = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).unwrap();
        Some(folder.join(name))
    };
    FleetArgs {
        fleet_cert: write("cert.pem", &pair.0),
        fleet_key: write("key.pem", &pair.1),
        fleet_ca: write("ca.pem", &ca.pem),
    }
}

fn router(ca: &Authority, pair: &Pair) -> (WorkerTransport, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let transport = WorkerTransport::load(&files(folder.path(), ca, pair)).unwrap();
    (transport, folder)
}

/// Whether the worker's first message comes.
async fn greet(transport: &WorkerTransport, worker: &mut FakeWorker) -> Result<(), Box<dyn Error>> {
    let endpoint = transport.endpoint(&worker.address.to_string())?;
    let call = async {
        let mut client = WorkerClient::new(endpoint.connect().await?);
        let mut answers = client.serve(tokio_stream::pending()).await?.into_inner();
        Ok::<_, Box<dyn Error>>(answers.message().await?.is_some())
    };
    let answer = async {
        let session = worker.session().await;
        let hello = tasuki_wire::v1::worker_message::Message::Info(info("e", Default::default()));
        session.send(hello);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        heard = timeout(LONG, call) => {
            assert!(heard??, "the stream ended");
            Ok(())
        }
        () = answer => unreachable!(),
    }
}

async fn refused(transport: &WorkerTransport, worker: &mut FakeWorker) {
    let error = greet(transport, worker).await.expect_err("a refusal");
    assert!(is_misunderstanding(error.as_ref()), "{error:?}");
}

#[tokio::test]
async fn certificates_of_one_ca_are_accepted_whatever_the_address() {
    let ca = Authority::new();
    let mut worker = ca.worker(&ca.pair(FLEET_NAME, 4000)).await;
    let (transport, _folder) = router(&ca, &ca.pair(FLEET_NAME, 4000));
    greet(&transport, &mut worker).await.unwrap();
}

#[tokio::test]
async fn a_router_without_a_certificate_of_the_ca_is_refused() {
    let (ca, other) = (Authority::new(), Authority::new());
    let mut worker = ca.worker(&ca.pair(FLEET_NAME, 4000)).await;
    refused(&WorkerTransport::Plain, &mut worker).await;
    for pair in [other.pair(FLEET_NAME, 4000), ca.pair(FLEET_NAME, 2000)] {
        let (transport, _folder) = router(&ca, &pair);
        refused(&transport, &mut worker).await;
    }
}

#[tokio::test]
async fn a_worker_without_a_certificate_of_the_ca_is_refused() {
    let (ca, other) = (Authority::new(), Authority::new());
    let (transport, _folder) = router(&ca, &ca.pair(FLEET_NAME, 4000));
    refused(&transport, &mut FakeWorker::start().await).await;
    for pair in [
        other.pair(FLEET_NAME, 4000),
        ca.pair("elsewhere", 4000),
        ca.pair(FLEET_NAME, 2000),
    ] {
        refused(&transport, &mut ca.worker(&pair).await).await;
    }
}

#[tokio::test]
async fn new_certificates_are_used_for_new_connections() {
    let ca = Authority::new();
    let mut worker = ca.worker(&ca.pair(FLEET_NAME, 4000)).await;
    let (transport, folder) = router(&ca, &ca.pair(FLEET_NAME, 2000));
    refused(&transport, &mut worker).await;
    files(folder.path(), &ca, &ca.pair(FLEET_NAME, 4000));
    greet(&transport, &mut worker).await.unwrap();
}

#[test]
fn files_that_do_not_fit_together_are_refused_at_start() {
    let ca = Authority::new();
    let pair = ca.pair(FLEET_NAME, 4000);
    let folder = tempfile::tempdir().unwrap();
    let args = files(folder.path(), &ca, &pair);
    let wrong = |text: &str, file: &str| {
        let path = folder.path().join(file);
        let before = std::fs::read(&path).unwrap();
        std::fs::write(&path, text).unwrap();
        let error = WorkerTransport::load(&args).unwrap_err().to_string();
        std::fs::write(&path, before).unwrap();
        error
    };
    let other = wrong(&ca.pair(FLEET_NAME, 4000).1, "key.pem");
    assert!(
        other.starts_with("--fleet-cert and --fleet-key do not fit together"),
        "{other}"
    );
    let empty = wrong("", "ca.pem");
    assert!(empty.starts_with("--fleet-ca "), "{empty}");
    assert!(empty.ends_with("it has no certificate"), "{empty}");
    assert!(WorkerTransport::load(&args).is_ok());
}
