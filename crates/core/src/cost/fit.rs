//! Linear models fitted to measurements as they come.

#![expect(
    clippy::needless_range_loop,
    reason = "rows and columns are indices, as in the formulas"
)]

/// How far one measurement is usually off, as a share of its value.
const NOISE: f64 = 0.1;
/// A measurement moves the model no further than one that is so many times its usual error off.
const OUTLIER: f64 = 3.0;
/// What is left of older information about a direction when a sample adds to it: a memory
/// of about a hundred samples.
const KEPT: f64 = 0.97;
/// A term below this share of every measurement cannot be told from noise: it is twice the error
/// that is left in the mean of a memory's samples.
const RESOLVED: f64 = 0.02;
/// No measurement is shorter than that, in seconds: its weight would exceed all others'.
const LEAST: f64 = 1e-9;
/// Rounds of the descent that makes coefficients non-negative.
const ROUNDS: usize = 100;

/// `y = θ·x` with non-negative coefficients, by recursive least squares of relative errors.
///
/// A coefficient has a floor: its prior, or less once its term at that floor would be
/// `RESOLVED` of some sample. Without the floor, noise takes a coefficient whose term is small
/// in all samples to 0, and larger inputs then cost nothing until one of them is measured.
///
/// A sample discounts older ones in its own direction alone. So the newest samples
/// prevail where there are any, and what others taught about different inputs is kept however
/// long ago it was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearFit<const N: usize> {
    theta: [f64; N],
    prior: [f64; N],
    /// By input, the largest `x / y` of the samples.
    seen: [f64; N],
    /// Inverse of the coefficients' covariance.
    information: [[f64; N]; N],
    /// The least that a coefficient counts for where doubt is relative to it.
    least: [f64; N],
    samples: u64,
}

impl<const N: usize> LinearFit<N> {
    /// A model that knows `prior`, each coefficient of which may be wrong by a factor of `doubt`.
    pub fn new(prior: [f64; N], doubt: f64) -> Self {
        Self {
            theta: prior,
            prior,
            seen: [0.0; N],
            information: [[0.0; N]; N],
            least: prior.map(|theta| theta / doubt),
            samples: 0,
        }
        .doubted(doubt)
    }

    /// The same coefficients as a prior, of which each may be wrong by a factor of `doubt`.
    pub fn doubted(&self, doubt: f64) -> Self {
        let mut information = [[0.0; N]; N];
        for i in 0..N {
            information[i][i] = (self.theta[i].max(self.least[i]) * doubt).powi(-2);
        }
        Self {
            information,
            prior: self.theta,
            seen: [0.0; N],
            samples: 0,
            ..*self
        }
    }

    /// The same proportions, all coefficients faster or slower by one factor: so that `x`
    /// takes `y`. A prior's proportions are nearer the truth than its pace, which the first
    /// measurement tells; without this the largest coefficient would take all of the difference.
    /// A measurement that is not finite and positive tells no pace.
    pub fn at_pace_of(&self, x: &[f64; N], y: f64) -> Self {
        let factor = y.max(LEAST) / self.at(x);
        let tells = y.is_finite() && y > 0.0 && factor.is_finite() && factor > 0.0;
        if !tells {
            return *self;
        }
        Self {
            theta: self.theta.map(|theta| theta * factor),
            prior: self.prior.map(|prior| prior * factor),
            seen: self.seen.map(|seen| seen / factor),
            information: self
                .information
                .map(|row| row.map(|entry| entry / factor.powi(2))),
            least: self.least.map(|least| least * factor),
            ..*self
        }
    }

    /// Takes a measurement into account; one that is not finite and positive counts as nothing.
    pub fn learn(&mut self, x: [f64; N], y: f64) {
        let usable = y.is_finite() && y > 0.0 && x.iter().all(|x| x.is_finite() && *x >= 0.0);
        if !usable || x.iter().all(|x| *x == 0.0) {
            return;
        }
        self.samples += 1;
        let y = y.max(LEAST);
        let expected = self.at(&x);
        // Not by shares of what is expected: that is 0 where all coefficients in x are.
        let usual = ((NOISE * expected).powi(2) + self.variance(&x)).sqrt();
        let off = (y - expected).clamp(-OUTLIER * usual, OUTLIER * usual);
        let counted = (expected + off).max(expected / OUTLIER);
        let weight = (NOISE * counted).powi(-2);
        for (seen, x) in self.seen.iter_mut().zip(x) {
            *seen = seen.max(x / counted);
        }
        // Older information about this very sum of coefficients: all else is kept.
        let Some(spread) = self.solve(x) else {
            return;
        };
        let older = (1.0 - KEPT) / dot(&x, &spread);
        for (row, xi) in self.information.iter_mut().zip(x) {
            for (entry, xj) in row.iter_mut().zip(x) {
                *entry += (weight - older) * xi * xj;
            }
        }
        let Some(step) = self.solve(x.map(|x| x * weight * off)) else {
            return;
        };
        let mut free = self.theta;
        for i in 0..N {
            free[i] += step[i];
        }
        self.theta = self.nearest_allowed(free);
    }

    /// The expected measurement.
    pub fn at(&self, x: &[f64; N]) -> f64 {
        dot(&self.theta, x)
    }

    /// How far [`LinearFit::at`] may be off, as a share of its value: large without samples
    /// like `x`, small with many.
    pub fn doubt(&self, x: &[f64; N]) -> f64 {
        self.variance(x).sqrt() / self.at(x).max(f64::MIN_POSITIVE)
    }

    fn variance(&self, x: &[f64; N]) -> f64 {
        let variance = self.solve(*x).map_or(f64::INFINITY, |by| dot(x, &by));
        variance.max(0.0)
    }

    pub fn coefficients(&self) -> [f64; N] {
        self.theta
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// `information⁻¹ v`, by Gaussian elimination of the scaled, positive definite matrix.
    fn solve(&self, v: [f64; N]) -> Option<[f64; N]> {
        let mut scale = [0.0; N];
        for i in 0..N {
            scale[i] = self.information[i][i].sqrt().recip();
        }
        let (mut a, mut b) = (self.information, v);
        for i in 0..N {
            b[i] *= scale[i];
            for j in 0..N {
                a[i][j] *= scale[i] * scale[j];
            }
        }
        for k in 0..N {
            // Above zero but for rounding: the scaled diagonal was 1.
            let pivot = a[k][k].max(1e-12);
            for i in k + 1..N {
                let factor = a[i][k] / pivot;
                for j in k..N {
                    a[i][j] -= factor * a[k][j];
                }
                b[i] -= factor * b[k];
            }
            a[k][k] = pivot;
        }
        for k in (0..N).rev() {
            let known: f64 = (k + 1..N).map(|j| a[k][j] * b[j]).sum();
            b[k] = (b[k] - known) / a[k][k];
        }
        for i in 0..N {
            b[i] *= scale[i];
        }
        b.iter().all(|x| x.is_finite()).then_some(b)
    }

    /// The least value of each coefficient, see [`LinearFit`].
    fn floor(&self) -> [f64; N] {
        let mut floor = self.prior;
        for (floor, seen) in floor.iter_mut().zip(self.seen) {
            *floor = floor.min(RESOLVED / seen);
        }
        floor
    }

    /// What fits the information best among the vectors with no coefficient below its floor.
    fn nearest_allowed(&self, free: [f64; N]) -> [f64; N] {
        let floor = self.floor();
        let mut near = free;
        for i in 0..N {
            near[i] = free[i].max(floor[i]);
        }
        if near == free {
            return free;
        }
        for _ in 0..ROUNDS {
            for i in 0..N {
                let slope: f64 = (0..N)
                    .map(|j| self.information[i][j] * (near[j] - free[j]))
                    .sum();
                near[i] = (near[i] - slope / self.information[i][i]).max(floor[i]);
            }
        }
        near
    }
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
