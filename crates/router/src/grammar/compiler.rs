//! Compiles grammars on threads of its own, since the library recurses and a grammar may take long.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, panic_utils};
use tasuki_flow::Grammar;

use super::GrammarError;

/// For one grammar, and for its turn. Most take milliseconds.
pub const LIMIT: Duration = Duration::from_secs(2);
/// What [`super::size`] lets through needs less than a quarter of it.
pub const STACK_BYTES: usize = 64 << 20;
/// Grammars that are compiled at once.
const THREADS: usize = 4;
/// Of the library's reason, which may quote much of a grammar.
const MAX_REASON_CHARS: usize = 300;

/// At most [`THREADS`] threads at once.
#[derive(Default)]
pub struct Compiler(Arc<Threads>);

#[derive(Default)]
struct Threads {
    running: Mutex<usize>,
    one_ended: Condvar,
}

/// The place of a thread, given back when the thread ends.
struct Place(Arc<Threads>);

impl Compiler {
    /// Runs `work`, and waits for it. A thread that takes too long keeps its place until it ends.
    pub fn run(
        &self,
        work: impl FnOnce() -> Result<(), GrammarError> + Send + 'static,
    ) -> Result<(), GrammarError> {
        let place = self.place()?;
        let (sender, result) = sync_channel(1);
        let compile = move || {
            let result = work();
            drop(place);
            // The caller may have stopped waiting.
            let _ = sender.send(result);
        };
        thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(compile)
            .map_err(|_| GrammarError::Crowded { limit: THREADS })?;
        result.recv_timeout(LIMIT).unwrap_or_else(|error| {
            Err(match error {
                RecvTimeoutError::Timeout => GrammarError::Slow(LIMIT),
                RecvTimeoutError::Disconnected => gave_up(),
            })
        })
    }

    fn place(&self) -> Result<Place, GrammarError> {
        let threads = self
            .0
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let all_taken = |threads: &mut usize| *threads >= THREADS;
        let waited = self
            .0
            .one_ended
            .wait_timeout_while(threads, LIMIT, all_taken);
        let (mut threads, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(GrammarError::Crowded { limit: THREADS });
        }
        *threads += 1;
        Ok(Place(Arc::clone(&self.0)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self
            .0
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.one_ended.notify_one();
    }
}

/// Compiles a grammar, and takes a look at what an answer may begin with.
///
/// # Errors
/// `NotSupported`, with the library's reason.
pub fn compile(factory: &ParserFactory, grammar: &Grammar) -> Result<(), GrammarError> {
    let compiled = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
        factory.create_parser(top_level(grammar)?)
    }));
    let parser = compiled.map_err(|error| refused(&format!("{error:#}")))?;
    let mut matcher = Matcher::new(Ok(parser));
    match matcher.compute_mask_or_eos() {
        Ok(begin) if !begin.is_zero() => Ok(()),
        Err(error) if !error.to_string().starts_with("NoExtension") => {
            Err(refused(&error.to_string()))
        }
        _ => Err(GrammarError::NotSupported("no text can match it".into())),
    }
}

pub fn top_level(grammar: &Grammar) -> anyhow::Result<TopLevelGrammar> {
    Ok(match grammar {
        Grammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text);
            let schema = schema.map_err(|error| anyhow::anyhow!("it is no JSON: {error}"))?;
            TopLevelGrammar::from_json_schema(schema)
        }
        Grammar::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

/// The library's reason in one line. Its keywords are a list of Rust's.
fn refused(reason: &str) -> GrammarError {
    if reason.starts_with("panic") {
        return gave_up();
    }
    if let Some((_, list)) = reason.split_once("Unimplemented keys: [") {
        let keywords = list.split(']').next().unwrap_or_default().replace('"', "");
        let reason = format!("it has the keywords {keywords}, which cannot be followed");
        return GrammarError::NotSupported(reason);
    }
    if let Some((_, said)) = reason.split_once("regex parse error:") {
        // The pattern is repeated in lines of its own; a later one has the reason.
        let said = said
            .lines()
            .find_map(|line| line.trim().strip_prefix("error: "));
        let said = said.unwrap_or("it cannot be read");
        return one_line(&format!("regular expression: {said}"));
    }
    one_line(reason)
}

fn one_line(reason: &str) -> GrammarError {
    let line = reason
        .lines()
        .next()
        .unwrap_or_default()
        .trim_end_matches('.');
    let reason = line.chars().take(MAX_REASON_CHARS).collect();
    GrammarError::NotSupported(reason)
}

/// A panic inside the library, which is a defect of it.
fn gave_up() -> GrammarError {
    GrammarError::NotSupported("the grammar compiler gave up on it".into())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_slow_grammar_is_given_up_and_the_number_of_threads_is_bounded() {
        let compiler = Compiler::default();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let slow = |compiler: &Compiler| {
            let released = Arc::clone(&released);
            compiler.run(move || {
                let _ = released.lock().unwrap().recv();
                Ok(())
            })
        };
        thread::scope(|scope| {
            let running: Vec<_> = (0..THREADS)
                .map(|_| scope.spawn(|| slow(&compiler)))
                .collect();
            for thread in running {
                assert_eq!(thread.join().unwrap(), Err(GrammarError::Slow(LIMIT)));
            }
        });
        let crowded = GrammarError::Crowded { limit: THREADS };
        assert_eq!(compiler.run(|| Ok(())), Err(crowded));
        drop(release);
        assert_eq!(compiler.run(|| Ok(())), Ok(()));
    }

    #[test]
    fn a_panic_is_a_refusal() {
        let compiler = Compiler::default();
        for _ in 0..=THREADS {
            let panics = || -> Result<(), GrammarError> { panic!("expected by this test") };
            assert_eq!(compiler.run(panics), Err(gave_up()));
        }
    }
}
