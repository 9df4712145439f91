//! Finds stop strings in a stream of text pieces.
//!
//! One Knuth-Morris-Pratt automaton per stop string runs over the bytes, so the
//! cost per byte does not depend on what came before, and the outcome does not
//! depend on where the pieces were cut. What may still become a stop string is
//! held back; everything else is given out at once. The automata are built once per
//! request and shared by all its choices; a choice keeps only its states.

use std::sync::Arc;

#[derive(Debug)]
struct Automaton {
    /// Which of the stop strings this is.
    index: usize,
    pattern: Vec<u8>,
    /// `fallback[k]`: length of the longest proper border of `pattern[..=k]`.
    fallback: Vec<u32>,
}

impl Automaton {
    fn new(index: usize, pattern: &str) -> Self {
        let pattern = pattern.as_bytes().to_vec();
        let mut fallback = vec![0; pattern.len()];
        let mut border = 0;
        for k in 1..pattern.len() {
            while border > 0 && pattern[k] != pattern[border] {
                border = fallback[border - 1] as usize;
            }
            if pattern[k] == pattern[border] {
                border += 1;
            }
            fallback[k] = u32::try_from(border).expect("a stop string is shorter than 4 GiB");
        }
        Self {
            index,
            pattern,
            fallback,
        }
    }

    /// Takes one byte; true when the pattern ends with it. `matched`: how much of the
    /// pattern the text so far ends with.
    fn step(&self, matched: &mut usize, byte: u8) -> bool {
        while *matched > 0 && self.pattern[*matched] != byte {
            *matched = self.fallback[*matched - 1] as usize;
        }
        if self.pattern[*matched] == byte {
            *matched += 1;
        }
        *matched == self.pattern.len()
    }
}

/// The stop strings of a request, compiled: 5 bytes for each of theirs.
#[derive(Debug, Default)]
pub struct StopStrings(Vec<Automaton>);

impl StopStrings {
    /// Empty strings never match.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().enumerate();
        let stops = stops.filter(|(_, stop)| !stop.is_empty());
        Self(
            stops
                .map(|(index, stop)| Automaton::new(index, stop))
                .collect(),
        )
    }
}

/// Watches one choice's text for the stop strings.
///
/// The match that ends first wins; of those that end together, the longest.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Arc<StopStrings>,
    /// How much of each stop string the text so far ends with.
    matched: Vec<usize>,
    include: bool,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher for `stops`; with `include` the stop string itself is given out.
    #[must_use]
    pub fn new(stops: Arc<StopStrings>, include: bool) -> Self {
        Self {
            matched: vec![0; stops.0.len()],
            stops,
            include,
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next piece of text and appends to `out` what is now safe to give out.
    /// Returns the index of the stop string that ended the text; after it all is swallowed.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stopped {
            return None;
        }
        if self.matched.is_empty() {
            out.push_str(text);
            return None;
        }
        for (offset, byte) in text.bytes().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for (automaton, matched) in self.stops.0.iter().zip(&mut self.matched) {
                let length = automaton.pattern.len();
                let ends = automaton.step(matched, byte);
                if ends && found.is_none_or(|(_, longest)| length > longest) {
                    found = Some((automaton.index, length));
                }
            }
            if let Some((index, length)) = found {
                self.stopped = true;
                self.held.push_str(&text[..=offset]);
                let kept = self.held.len() - if self.include { 0 } else { length };
                out.push_str(&self.held[..kept]);
                self.held.clear();
                return Some(index);
            }
        }
        self.held.push_str(text);
        let pending = self.matched.iter().copied().max();
        let safe = self.held.len() - pending.unwrap_or(0);
        out.push_str(&self.held[..safe]);
        self.held.drain(..safe);
        None
    }

    /// The text ended without a stop string: gives out what was held back.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{StopMatcher, StopStrings};

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        let stops: Vec<_> = stops.iter().map(ToString::to_string).collect();
        StopMatcher::new(Arc::new(StopStrings::new(&stops)), include)
    }

    fn pushed(matcher: &mut StopMatcher, text: &str) -> (String, Option<usize>) {
        let mut out = String::new();
        let stopped = matcher.push(text, &mut out);
        (out, stopped)
    }

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = matcher(stops, include);
        let mut text = String::new();
        for piece in pieces {
            let stopped = matcher.push(piece, &mut text);
            if stopped.is_some() {
                return (text, stopped);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    #[test]
    fn holds_back_only_what_may_be_a_stop_string() {
        let mut matcher = matcher(&["\n\nUser:"], false);
        let mut told = |text| pushed(&mut matcher, text);
        assert_eq!(told("Hello\n"), ("Hello".into(), None));
        assert_eq!(told("\nUse"), ("".into(), None));
        assert_eq!(told("d"), ("\n\nUsed".into(), None));
        assert_eq!(told(" it\n\n\n"), (" it\n".into(), None));
        assert_eq!(told("User: hi"), ("".into(), Some(0)));
        assert_eq!(told("more"), ("".into(), None));
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn flushes_what_never_became_a_stop_string() {
        assert_eq!(run(&["abc"], false, &["xab"]), ("xab".into(), None));
    }

    #[test]
    fn includes_the_stop_string_when_asked() {
        let pieces = ["one EN", "D two"];
        assert_eq!(run(&["END"], true, &pieces), ("one END".into(), Some(0)));
        assert_eq!(run(&["END"], false, &pieces), ("one ".into(), Some(0)));
    }

    #[test]
    fn the_match_that_ends_first_wins_and_then_the_longest() {
        assert_eq!(
            run(&["abcd", "bc"], false, &["abcd"]),
            ("a".into(), Some(1))
        );
        assert_eq!(run(&["bc", "abc"], false, &["xabc"]), ("x".into(), Some(1)));
        assert_eq!(run(&["", "z"], false, &["az"]), ("a".into(), Some(1)));
    }

    #[test]
    fn the_outcome_does_not_depend_on_the_borders() {
        let text = "aababa…ba\u{301}ab…x界界ab…ab🙂ab…ab界🙂!";
        let stops = ["ab…ab界", "界🙂!", "abab…"];
        let chars: Vec<String> = text.chars().map(String::from).collect();
        for include in [false, true] {
            let whole = run(&stops, include, &[text]);
            assert_eq!(whole.1, Some(0));
            for size in 1..=chars.len() {
                let pieces: Vec<String> = chars.chunks(size).map(|c| c.concat()).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                assert_eq!(run(&stops, include, &pieces), whole, "pieces of {size}");
            }
        }
    }

    #[test]
    fn matchers_of_one_request_do_not_disturb_each_other() {
        let stops = Arc::new(StopStrings::new(&["END".to_owned()]));
        let mut first = StopMatcher::new(Arc::clone(&stops), false);
        let mut second = StopMatcher::new(stops, false);
        assert_eq!(pushed(&mut first, "EN").0, "");
        assert_eq!(pushed(&mut second, "D").0, "D");
        assert_eq!(pushed(&mut first, "D").1, Some(0));
        assert_eq!(pushed(&mut second, "END").1, Some(0));
    }

    #[test]
    fn long_periodic_stop_strings_stay_linear() {
        let stop = format!("{}b", "a".repeat(4096));
        let mut matcher = matcher(&[&stop], false);
        let mut text = String::new();
        for _ in 0..200_000 {
            matcher.push("a", &mut text);
        }
        assert_eq!(text.len(), 200_000 - 4096);
        assert_eq!(pushed(&mut matcher, "b"), (String::new(), Some(0)));
    }
}
