//! How many GPUs a worker may have, and how fast it is with them.

use std::collections::BTreeMap;

use super::args::GoalArgs;
use crate::args::HardwareArgs;
use crate::error::SimulateError;
use crate::hardware::Hardware;
use crate::replay::Logged;

/// The hardware by degree of tensor parallelism. Workers of a log have those GPUs that they had.
///
/// # Errors
///
/// Nothing says how long steps take, or no degree fits.
pub fn by_degree(
    args: &HardwareArgs,
    goal: &GoalArgs,
    log: Option<&Logged>,
) -> Result<BTreeMap<u32, Hardware>, SimulateError> {
    if args.gpu.is_none() {
        let given = args.steps.is_some() || args.rates.is_some();
        let (degree, hardware) = match log {
            Some(log) if !given && !log.tells_steps() => return Err(SimulateError::NoLoggedSteps),
            Some(log) if !given => (log.tensor_parallel(), Hardware::or(args, log.source())?),
            _ => (1, Hardware::new(args)?),
        };
        return Ok(BTreeMap::from([(degree, hardware)]));
    }
    let mut known = BTreeMap::new();
    let mut refused = None;
    let given = args.tensor_parallel;
    let degrees = if given > 1 {
        vec![given]
    } else {
        vec![1, 2, 4, 8]
    };
    let most = goal.gpus.min(goal.gpus_per_host);
    for tensor_parallel in degrees {
        if tensor_parallel > most {
            break;
        }
        let args = HardwareArgs {
            tensor_parallel,
            ..args.clone()
        };
        match Hardware::new(&args) {
            Ok(hardware) => {
                known.insert(tensor_parallel, hardware);
            }
            // More GPUs may have room for the weights.
            Err(error @ (SimulateError::TooLarge { .. } | SimulateError::Pool { .. })) => {
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    match refused {
        Some(SimulateError::TooLarge {
            weights_gb,
            gpu,
            gpus,
        }) if known.is_empty() && 2 * gpus > most => Err(SimulateError::TooLargeForAll {
            weights_gb,
            gpu,
            gpus,
        }),
        Some(error) if known.is_empty() => Err(error),
        None if known.is_empty() => Err(SimulateError::Degree {
            given,
            gpus: goal.gpus,
            gpus_per_host: goal.gpus_per_host,
        }),
        _ => Ok(known),
    }
}
