//! SGLang's `/health_generate`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderName, StatusCode};
use futures::future::join_all;
use tasuki_core::FailureKind;
use tasuki_policy::NoPlacement;

use super::get;
use crate::app::{App, HttpSettings};
use crate::health_generate::Probes;
use crate::models::Models;
use crate::serve::api::{Event, ServeError};
use crate::testing::{FakeGenerator, MODEL, TestModel, say, settings};
use crate::workers::testing::until;

const PATH: &str = "/health_generate";
/// Beyond the end of any test.
const LONG: Duration = Duration::from_secs(3_600);
const SHORT: Duration = Duration::from_millis(50);

fn probed(generator: &Arc<FakeGenerator>, probes: Probes) -> Arc<App> {
    let generator = Arc::clone(generator);
    let app = App::new(generator, TestModel::new().only(), settings());
    Arc::new(App { probes, ..app })
}

#[tokio::test]
async fn probes_that_come_together_share_one_generation() {
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    let app = probed(&generator, Probes::new(LONG, LONG));
    let answered = async {
        let started = || !generator.started.lock().unwrap().is_empty();
        until("a generation", started).await;
        let events = say(&generator.seen.lock().unwrap()[0], "ab");
        let started = generator.started.lock().unwrap();
        for event in events {
            started[0].0.send(event);
        }
    };
    let probes = join_all((0..3).map(|_| get(&app, PATH)));
    let (answers, ()) = tokio::join!(probes, answered);
    for answer in answers {
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    }
    assert_eq!(get(&app, PATH).await.status, StatusCode::OK);
    let seen = generator.seen.lock().unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].n, seen[0].sampling.max_tokens), (1, 2));
    assert_eq!(&*seen[0].tenant, "health_generate");
}

#[tokio::test]
async fn a_probe_is_a_tenant_of_its_own_where_a_header_names_tenants() {
    let generator = Arc::new(FakeGenerator::saying("ab"));
    let settings = HttpSettings {
        tenant_header: Some(HeaderName::from_static("x-team")),
        ..settings()
    };
    let app = App::new(
        Arc::clone(&generator) as _,
        TestModel::new().only(),
        settings,
    );
    let answer = get(&Arc::new(app), PATH).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert_eq!(
        &*generator.seen.lock().unwrap()[0].tenant,
        "health_generate"
    );
}

#[tokio::test]
async fn a_probe_that_hangs_up_leaves_its_generation_to_the_next_one() {
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    let app = probed(&generator, Probes::new(LONG, LONG));
    let started = || !generator.started.lock().unwrap().is_empty();
    tokio::select! {
        answer = get(&app, PATH) => panic!("{}", answer.text),
        () = until("a generation", started) => {}
    }
    {
        let (events, _) = &generator.started.lock().unwrap()[0];
        assert!(!events.is_closed(), "the generation ended with its probe");
        for event in say(&generator.seen.lock().unwrap()[0], "ab") {
            events.send(event);
        }
    }
    assert_eq!(get(&app, PATH).await.status, StatusCode::OK);
    assert_eq!(generator.seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_generation_that_does_not_end_is_given_up_with_the_reason() {
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    // It begins within the limit on a busy machine too.
    let app = probed(&generator, Probes::new(LONG, Duration::from_secs(1)));
    for _ in 0..2 {
        let answer = get(&app, PATH).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        let reason = "a generation of 2 tokens was not finished after 1s";
        assert!(answer.text.contains(reason), "{}", answer.text);
        assert!(answer.headers.contains_key("retry-after"));
    }
    let (_, mut stops) = generator.started.lock().unwrap().pop().unwrap();
    assert_eq!(stops.recv().await, None, "it is dropped");
    assert_eq!(generator.seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn tokens_of_clients_answer_a_probe() {
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    let app = probed(&generator, Probes::new(LONG, SHORT));
    *generator.last_decoded.lock().unwrap() = Some(Instant::now());
    assert_eq!(get(&app, PATH).await.status, StatusCode::OK);
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_generation_that_fails_is_the_reason() {
    let failed = || {
        Event::Failed(ServeError::Failed {
            kind: FailureKind::Model,
            message: "logits are not finite".into(),
        })
    };
    let generator = Arc::new(FakeGenerator::new(move |_| vec![failed()]));
    let app = probed(&generator, Probes::new(Duration::ZERO, LONG));
    *generator.last_decoded.lock().unwrap() = Some(Instant::now());
    let answer = get(&app, PATH).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    let reason = "a generation of 2 tokens failed: logits are not finite";
    assert!(answer.text.contains(reason), "{}", answer.text);
}

#[tokio::test]
async fn where_it_finds_no_place_the_tokens_of_others_decide() {
    let generator = Arc::new(FakeGenerator::saying("ab"));
    let app = probed(&generator, Probes::new(Duration::ZERO, SHORT));
    let _all = app.gate.enter(4).expect("there is room");
    let answer = get(&app, PATH).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        answer.text.contains("4 sequences are running"),
        "{}",
        answer.text
    );
    // One that comes while it looks.
    *generator.last_decoded.lock().unwrap() = Some(Instant::now() + LONG);
    assert_eq!(get(&app, PATH).await.status, StatusCode::OK);
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_probe_names_a_model_where_there_are_several() {
    let generator = Arc::new(FakeGenerator::saying("ab"));
    let status = async |app: &Arc<App>, query: &str| {
        let answer = get(app, &format!("{PATH}{query}")).await;
        (answer.status.as_u16(), answer.text)
    };
    let app = probed(&generator, Probes::default());
    assert_eq!(status(&app, &format!("?model={MODEL}")).await.0, 200);
    let (unknown, text) = status(&app, "?model=gpt").await;
    assert_eq!(unknown, 404, "{text}");
    app.gate.leave();
    let (leaving, text) = status(&app, "").await;
    assert_eq!(leaving, 503, "{text}");

    let model = TestModel::new();
    let named = |name: &str| (vec![name.to_owned()], Arc::clone(&model.text));
    let two = Models::new(vec![named("a"), named("b")]);
    let app = Arc::new(App::new(Arc::clone(&generator) as _, two, settings()));
    let (nameless, text) = status(&app, "").await;
    assert_eq!(nameless, 400, "{text}");
    assert!(text.contains("Served here: a, b"), "{text}");
    assert_eq!(status(&app, "?model=b").await.0, 200);
}

#[tokio::test]
async fn without_a_worker_no_generation_is_tried() {
    let generator = Arc::new(FakeGenerator::down(NoPlacement::NoWorker));
    *generator.last_decoded.lock().unwrap() = Some(Instant::now());
    let app = probed(&generator, Probes::new(LONG, SHORT));
    let answer = get(&app, PATH).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.text.contains("no worker is up"), "{}", answer.text);
    assert!(generator.seen.lock().unwrap().is_empty());
}
