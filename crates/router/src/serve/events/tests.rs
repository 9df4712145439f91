//! What waits stays bounded, and nothing of it is lost or reordered.

use std::future::poll_fn;
use std::time::Duration;

use tasuki_flow::Finish;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;
use crate::attached::{self, attach};
use crate::workers::testing::soon;

fn tokens(choice: u32, tokens: &[u32], top: usize) -> Event {
    let logprob = |&token: &u32| TokenLogprob {
        token,
        top: vec![TopLogprob::default(); top],
        ..TokenLogprob::default()
    };
    let logprobs = if top > 0 {
        tokens.iter().map(logprob).collect()
    } else {
        Vec::new()
    };
    Event::Tokens {
        choice,
        tokens: tokens.to_vec(),
        logprobs,
        finish: None,
    }
}

async fn next(receiver: &mut EventReceiver) -> Option<Event> {
    poll_fn(|context| receiver.poll(None, context)).await
}

/// All that waits: events, and the tokens of each choice.
async fn read(receiver: &mut EventReceiver, choices: u32) -> (usize, Vec<Vec<u32>>) {
    let (mut events, mut seen) = (0, vec![Vec::new(); choices as usize]);
    while let Some(event) = soon("an event", next(receiver)).await {
        events += 1;
        if let Event::Tokens {
            choice,
            tokens,
            logprobs,
            ..
        } = event
        {
            assert!(tokens.len() <= TOKENS_AT_ONCE);
            assert!(logprobs.is_empty() || logprobs.len() == tokens.len());
            assert!(logprobs.iter().zip(&tokens).all(|(l, t)| l.token == *t));
            seen[choice as usize].extend(tokens);
        }
    }
    (events, seen)
}

#[tokio::test]
async fn a_client_that_reads_gets_every_event_by_itself() {
    let (sender, mut receiver) = channel(1);
    for token in 0..EVENTS_APART as u32 {
        sender.send(tokens(0, &[token], 0));
    }
    drop(sender);
    let (events, seen) = read(&mut receiver, 1).await;
    assert_eq!(events, EVENTS_APART);
    assert_eq!(seen[0], (0..EVENTS_APART as u32).collect::<Vec<_>>());
}

#[tokio::test]
async fn tokens_that_wait_are_joined_and_come_in_order() {
    for top in [0, 2] {
        let (sender, mut receiver) = channel(3);
        for token in 0..5_000 {
            sender.send(tokens(token % 3, &[token], top));
        }
        let finish = |choice| Event::Tokens {
            choice,
            tokens: vec![choice],
            logprobs: Vec::new(),
            finish: Some(Finish::Length),
        };
        if top == 0 {
            assert!((0..3).all(|choice| sender.send(finish(choice))));
        }
        sender.send(Event::Done(Box::default()));
        let held = sender.0.0.lock().waiting.len();
        assert!(held <= EVENTS_APART + 4, "{held}");
        drop(sender);
        let (events, seen) = read(&mut receiver, 3).await;
        assert!(events < 100, "{events}");
        for choice in 0..3 {
            let mut expected: Vec<u32> = (0..5_000).filter(|t| t % 3 == choice).collect();
            if top == 0 {
                expected.push(choice);
            }
            assert_eq!(seen[choice as usize], expected);
        }
    }
}

#[tokio::test]
async fn the_end_of_a_choice_comes_with_its_last_tokens() {
    let (sender, mut receiver) = channel(1);
    for token in 0..1_000 {
        sender.send(tokens(0, &[token], 0));
    }
    let Event::Tokens { mut finish, .. } = tokens(0, &[], 0) else {
        unreachable!()
    };
    assert!(finish.replace(Finish::Stop).is_none());
    sender.send(Event::Tokens {
        choice: 0,
        tokens: vec![7],
        logprobs: Vec::new(),
        finish,
    });
    drop(sender);
    let mut ends = Vec::new();
    while let Some(Event::Tokens { tokens, finish, .. }) = next(&mut receiver).await {
        ends.push((tokens.last().copied(), finish));
    }
    let last = ends.pop();
    assert_eq!(last, Some((Some(7), Some(Finish::Stop))));
    assert!(ends.iter().all(|(_, finish)| finish.is_none()));
}

#[tokio::test]
async fn the_longest_answer_without_logprobs_waits_in_a_few_hundred_kilobytes() {
    let (sender, mut receiver) = channel(1);
    for token in 0..100_000 {
        sender.send(tokens(0, &[token], 0));
    }
    {
        let queue = sender.0.0.lock();
        let Some(Event::Tokens { tokens: joined, .. }) = queue.waiting.back() else {
            panic!("tokens wait")
        };
        let events = size_of::<Event>() * queue.waiting.capacity();
        assert!(events + size_of::<u32>() * joined.capacity() < 600_000);
    }
    drop(sender);
    assert_eq!(read(&mut receiver, 1).await.1[0].len(), 100_000);
}

#[tokio::test]
async fn a_client_that_lets_too_much_wait_loses_its_request() {
    let (sender, mut receiver) = channel(2);
    let mut sent = 0;
    while !sender.0.0.lock().closed {
        sender.send(tokens(sent % 2, &[sent], 20));
        sent += 1;
        assert!(sent < 10_000, "it ends");
    }
    assert!(sent > 4_000);
    soon("the end", sender.closed()).await;
    sender.send(tokens(0, &[1], 0));
    let Some(Event::Failed(error)) = next(&mut receiver).await else {
        panic!("an error comes first")
    };
    assert_eq!(error.kind(), FailureKind::Client);
    assert!(error.to_string().contains("read too slowly"));
    assert!(next(&mut receiver).await.is_none());
}

#[tokio::test]
async fn either_end_learns_that_the_other_is_gone() {
    let (sender, receiver) = channel(1);
    let waits = timeout(Duration::from_millis(1), sender.closed()).await;
    assert!(waits.is_err());
    drop(receiver);
    soon("the client's end", sender.closed()).await;
    soon("the same again", sender.closed()).await;
    let (sender, mut receiver) = channel(1);
    let other = sender.clone();
    let reader = tokio::spawn(async move { next(&mut receiver).await.is_none() });
    drop(sender);
    drop(other);
    assert!(soon("the request's end", reader).await.expect("no panic"));
}

#[tokio::test]
async fn it_is_settled_when_its_work_was_polled_for_the_last_event() {
    let (sender, mut receiver) = channel(1);
    let (steps, mut numbers) = mpsc::unbounded_channel();
    let work = async move {
        while let Some(number) = numbers.recv().await {
            for _ in 0..number {
                sender.send(tokens(0, &[7], 0));
            }
        }
    };
    let connection = attached::run(async move {
        let attached = attach(work).expect("a place");
        let settled = async |receiver: &mut EventReceiver| {
            let event = poll_fn(|context| receiver.poll(Some(&attached), context)).await;
            event.map(|_| receiver.is_settled())
        };
        for number in [1, 2, 1] {
            steps.send(number).unwrap();
            for left in (0..number).rev() {
                // One that lay there says nothing of who is woken for the next.
                let fresh = left + 1 == number;
                assert_eq!(settled(&mut receiver).await, Some(fresh && left == 0));
            }
        }
        steps.send(1).unwrap();
        drop(steps);
        // The work has ended with it.
        assert_eq!(settled(&mut receiver).await, Some(false));
        assert_eq!(settled(&mut receiver).await, None);
    });
    soon("the connection's end", connection).await;
}
