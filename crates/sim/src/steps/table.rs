//! Step times between measured points, as `tasuki bench batch --steps` measures them.

use serde::Deserialize;

use super::Work;

/// A measured step that computes `tokens` of a prompt, after `context` tokens of it.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct PrefillRow {
    pub tokens: f64,
    pub context: f64,
    pub seconds: f64,
}

/// A measured step that decodes `batch` sequences of `context` tokens each.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct DecodeRow {
    pub batch: f64,
    pub context: f64,
    pub seconds: f64,
}

/// What `tokens` of a prompt, computed from its beginning, add to a measured step that decodes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct BesideRow {
    pub tokens: f64,
    pub seconds: f64,
}

/// Why a table cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error(
        "the step table has {points} {what} points with {what} sizes that differ; it needs 2: measure with two values of {option}"
    )]
    TooFew {
        what: &'static str,
        points: usize,
        option: &'static str,
    },
    #[error("the step table has a {what} step that took no time")]
    NoTime { what: &'static str },
}

/// Of a step that computes one prompt from its beginning, what remains at least if its tokens are
/// those of many prompts that attend to almost nothing.
const LEAST_WITHOUT_ATTENTION: f64 = 0.5;

/// Times between points are interpolated, beyond the last ones extrapolated, each linearly. A step
/// with more in it takes no less time: where it was measured so, the points are averaged, since what
/// disturbed the measurement must not make large steps free.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTable {
    /// Steps of prompts, one right after the other.
    prefill: Grid,
    /// The first of them, where that was measured apart: nothing runs while it is launched.
    first: Option<Grid>,
    decode: Grid,
    /// Rows that a step which only decodes is padded to, ascending; empty: it is not.
    decode_rows: Vec<f64>,
    /// What prompts add to decodes, where that was measured.
    beside: Option<Grid>,
    /// Else: of a step with prompts alone, what does not depend on them is not paid beside decodes.
    prompt_step_s: f64,
    largest_drop: f64,
}

impl StepTable {
    /// # Errors
    ///
    /// [`TableError`]: too few points, or a step without a time. `back_to_back` and `beside` may be
    /// empty, and what `beside` has may take no time.
    pub fn new(
        prefill: &[PrefillRow],
        back_to_back: &[PrefillRow],
        decode: &[DecodeRow],
        beside: &[BesideRow],
    ) -> Result<Self, TableError> {
        let prompts = |rows: &[PrefillRow]| {
            let points = rows
                .iter()
                .map(|row| (row.context, row.tokens, row.seconds));
            Grid::of_steps(points, "prefill", "--prefill-tokens")
        };
        let (prefill, first) = match back_to_back {
            [] => (prompts(prefill)?, None),
            _ => (prompts(back_to_back)?, Some(prompts(prefill)?)),
        };
        let points = decode
            .iter()
            .map(|row| (row.context, row.batch, row.seconds));
        let decode = Grid::of_steps(points, "decode", "--decode-batch")?;
        let nothing = std::iter::once((0.0, 0.0, 0.0));
        let points = beside.iter().map(|row| (0.0, row.tokens, row.seconds));
        let beside = match beside {
            [] => None,
            _ => Some(Grid::new(
                nothing.chain(points),
                "beside",
                "--prefill-tokens",
            )?),
        };
        let prompt_step_s = prefill.at(0.0, 0.0).max(0.0);
        let largest_drop = prefill.largest_drop.max(decode.largest_drop);
        Ok(Self {
            prefill,
            first,
            decode,
            beside,
            decode_rows: Vec::new(),
            prompt_step_s,
            largest_drop,
        })
    }

    /// The same of a worker that pads steps which only decode to one of so many rows: what CUDA
    /// graphs are recorded for. More rows are not padded.
    pub fn padded_to(mut self, mut decode_rows: Vec<f64>) -> Self {
        decode_rows.sort_by(f64::total_cmp);
        self.decode_rows = decode_rows;
        self
    }

    /// How much less time, as a share, a step took than the measured one with less in it. More than
    /// a few percent: something else ran on the machine.
    pub fn largest_drop(&self) -> f64 {
        self.largest_drop
    }

    pub fn step_s(&self, work: &Work) -> f64 {
        let mut seconds = 0.0;
        if work.sequences > 0.0 {
            let rows = match work.prompt_tokens > 0.0 {
                true => work.sequences,
                false => self.padded(work.sequences),
            };
            // Padding attends to nothing: all rows together attend to what was asked for.
            seconds += self.decode.at(work.kv_tokens / rows, rows);
        }
        if work.prompt_tokens > 0.0 {
            let alone_s = self.prompts_alone_s(work);
            seconds += match &self.beside {
                _ if work.sequences == 0.0 => alone_s,
                None => (alone_s - self.prompt_step_s).max(0.0),
                // Prompts attend to what is before them beside decodes as they do alone.
                Some(beside) => {
                    let from_begin_s = self.prefill.at(0.0, work.prompt_tokens);
                    (beside.at(0.0, work.prompt_tokens) + alone_s - from_begin_s).max(0.0)
                }
            };
        }
        seconds.max(1e-9)
    }

    fn padded(&self, sequences: f64) -> f64 {
        let next = self.decode_rows.partition_point(|&rows| rows < sequences);
        *self.decode_rows.get(next).unwrap_or(&sequences)
    }

    /// What the first step after a pause takes longer, if it only computes prompts.
    pub fn first_longer_s(&self, work: &Work) -> f64 {
        let Some(first) = &self.first else {
            return 0.0;
        };
        let tokens = work.prompt_tokens;
        if work.sequences > 0.0 || tokens == 0.0 {
            return 0.0;
        }
        let context = ((work.prompt_squares / tokens - tokens) / 2.0).max(0.0);
        (first.at(context, tokens) - self.prefill.at(context, tokens)).max(0.0)
    }

    /// Several prompts count as one that attends to as much. Short ones attend to less than one of
    /// their tokens from its beginning, as if it began before its first token.
    fn prompts_alone_s(&self, work: &Work) -> f64 {
        let tokens = work.prompt_tokens;
        let context = (work.prompt_squares / tokens - tokens) / 2.0;
        let alone_s = self.prefill.at(context.max(0.0), tokens);
        match context < 0.0 {
            true => {
                let least_s = LEAST_WITHOUT_ATTENTION * alone_s;
                self.prefill.at(context, tokens).clamp(least_s, alone_s)
            }
            false => alone_s,
        }
    }
}

/// Values on lines: each line has a `y` and values by `x`.
#[derive(Debug, Clone, PartialEq)]
struct Grid {
    ys: Vec<f64>,
    /// Pairs of x and value, which grows with x or stays.
    lines: Vec<Vec<(f64, f64)>>,
    largest_drop: f64,
}

impl Grid {
    /// The same of whole steps, each of which takes time.
    fn of_steps(
        points: impl Iterator<Item = (f64, f64, f64)>,
        what: &'static str,
        option: &'static str,
    ) -> Result<Self, TableError> {
        let points: Vec<_> = points.collect();
        if points.iter().any(|point| point.2 <= 0.0) {
            return Err(TableError::NoTime { what });
        }
        Self::new(points.into_iter(), what, option)
    }

    fn new(
        points: impl Iterator<Item = (f64, f64, f64)>,
        what: &'static str,
        option: &'static str,
    ) -> Result<Self, TableError> {
        let mut points: Vec<_> = points.collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut grid = Self {
            ys: Vec::new(),
            lines: Vec::new(),
            largest_drop: 0.0,
        };
        for (y, x, value) in points {
            if grid.ys.last() != Some(&y) {
                grid.ys.push(y);
                grid.lines.push(Vec::new());
            }
            if let Some(line) = grid.lines.last_mut()
                && line.last().is_none_or(|last| last.0 < x)
            {
                line.push((x, value));
            }
        }
        // A line with one point has no slope.
        let long: Vec<bool> = grid.lines.iter().map(|line| line.len() > 1).collect();
        let mut keep = long.iter();
        grid.ys.retain(|_| *keep.next().unwrap_or(&false));
        grid.lines.retain(|line| line.len() > 1);
        for line in &mut grid.lines {
            let drops = line.windows(2).map(|pair| 1.0 - pair[1].1 / pair[0].1);
            grid.largest_drop = drops.fold(grid.largest_drop, f64::max);
            rise(line);
        }
        if grid.lines.is_empty() {
            let points = long.len();
            return Err(TableError::TooFew {
                what,
                points,
                option,
            });
        }
        Ok(grid)
    }

    fn at(&self, y: f64, x: f64) -> f64 {
        let on = |line: usize| between(&self.lines[line], x);
        if self.ys.len() == 1 {
            return on(0);
        }
        let above = self.ys.partition_point(|known| *known < y);
        let above = above.clamp(1, self.ys.len() - 1);
        let (low, high) = (self.ys[above - 1], self.ys[above]);
        let share = (y - low) / (high - low);
        let (from, to) = (on(above - 1), on(above));
        if share > 1.0 {
            return to + (to - from).max(0.0) * (share - 1.0);
        }
        from * (1.0 - share) + to * share
    }
}

/// The value at `x` of a line of at least two points. Beyond the last one it rises as fast as before
/// it or as on the whole, whichever is faster; before the first one it is not below its share of that.
fn between(line: &[(f64, f64)], x: f64) -> f64 {
    let slope = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| (y1 - y0) / (x1 - x0);
    let last = line.len() - 1;
    let above = line.partition_point(|point| point.0 < x);
    let (from, to) = (above.clamp(1, last) - 1, above.clamp(1, last));
    let steep = slope(line[from], line[to]);
    if above > last {
        return line[last].1 + steep.max(slope(line[0], line[last])) * (x - line[last].0);
    }
    let value = line[from].1 + steep * (x - line[from].0);
    match line[0] {
        (x0, y0) if x < x0 => value.max(y0 * x / x0),
        _ => value,
    }
}

/// Replace values that fall by means of neighbours, as few as it takes (isotonic regression).
fn rise(line: &mut [(f64, f64)]) {
    let mut blocks: Vec<(f64, usize)> = Vec::new();
    for &(_, value) in line.iter() {
        let mut block = (value, 1);
        while let Some(&(mean, count)) = blocks.last()
            && mean > block.0
        {
            blocks.pop();
            let all = count + block.1;
            block.0 = (mean * count as f64 + block.0 * block.1 as f64) / all as f64;
            block.1 = all;
        }
        blocks.push(block);
    }
    let means = blocks
        .iter()
        .flat_map(|&(mean, count)| std::iter::repeat_n(mean, count));
    for (point, mean) in line.iter_mut().zip(means) {
        point.1 = mean;
    }
}

#[cfg(test)]
mod tests;
