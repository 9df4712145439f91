//! Designs: how GPUs are divided among workers, and all that there are.

use std::fmt::Write;

use tasuki_core::Role;

/// Workers of one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Part {
    pub workers: u32,
    pub tensor_parallel: u32,
}

impl Part {
    pub fn gpus(self) -> u32 {
        self.workers * self.tensor_parallel
    }
}

/// A topology, and the largest steps of its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Design {
    pub prefill: Part,
    pub decode: Part,
    pub mixed: Part,
    pub max_batched_tokens: u32,
    /// Of prefill workers, where theirs is another one.
    pub prefill_max_batched_tokens: Option<u32>,
    /// Workers do nothing but what their roles say. False where all have one role.
    pub strict_roles: bool,
}

impl Design {
    /// The same workers with strict roles; `None` where all have one role.
    pub fn strict(&self) -> Option<Self> {
        (self.roles() > 1).then_some(Self {
            strict_roles: true,
            ..*self
        })
    }

    pub fn is_colocated(&self) -> bool {
        self.prefill.workers + self.decode.workers == 0
    }

    /// Kinds of workers.
    pub fn roles(&self) -> usize {
        self.parts().count()
    }

    pub fn gpus(&self) -> u32 {
        self.prefill.gpus() + self.decode.gpus() + self.mixed.gpus()
    }

    /// What is left when a worker of a role is lost; `None`: no such worker, or nothing is left that
    /// could serve.
    pub fn without(&self, role: Role) -> Option<Self> {
        let mut left = *self;
        let part = match role {
            Role::Prefill => &mut left.prefill,
            Role::Decode => &mut left.decode,
            Role::Mixed => &mut left.mixed,
        };
        part.workers = part.workers.checked_sub(1)?;
        let both = left.prefill.workers > 0 && left.decode.workers > 0;
        let some = left.gpus() > 0 && !self.strict_roles;
        (both || left.mixed.workers > 0 || some).then_some(left)
    }

    /// Workers of a role.
    pub fn count(&self, role: Role) -> u32 {
        match role {
            Role::Prefill => self.prefill.workers,
            Role::Decode => self.decode.workers,
            Role::Mixed => self.mixed.workers,
        }
    }

    /// The largest step of a role's workers, in tokens.
    pub fn step_tokens(&self, role: Role) -> u32 {
        match (role, self.prefill_max_batched_tokens) {
            (Role::Prefill, Some(tokens)) => tokens,
            _ => self.max_batched_tokens,
        }
    }

    /// Such as `1024`, or `8192/1024` where prefill workers have the first one.
    pub fn steps(&self) -> String {
        match self.prefill_max_batched_tokens {
            Some(tokens) => format!("{tokens}/{}", self.max_batched_tokens),
            None => self.max_batched_tokens.to_string(),
        }
    }

    /// The same topology with such steps.
    pub fn sized(&self, tokens: u32, prefill: Option<u32>) -> Self {
        Self {
            max_batched_tokens: tokens,
            prefill_max_batched_tokens: prefill.filter(|own| *own != tokens),
            ..*self
        }
    }

    /// Whether some workers prefill for others.
    pub fn is_split(&self) -> bool {
        self.prefill.workers > 0 && self.decode.workers + self.mixed.workers > 0
    }

    /// Such as `2 prefill x2 + 4 decode`, or `1 prefill + 1 decode, strict`.
    pub fn name(&self) -> String {
        let mut name = String::new();
        for (part, role) in self.parts() {
            let plus = if name.is_empty() { "" } else { " + " };
            let _ = write!(name, "{plus}{} {role}", part.workers);
            if part.tensor_parallel > 1 {
                let _ = write!(name, " x{}", part.tensor_parallel);
            }
        }
        if self.strict_roles {
            name += ", strict";
        }
        name
    }

    /// Roles that have workers, in the order of names.
    pub fn parts(&self) -> impl Iterator<Item = (Part, &'static str)> {
        let parts = [
            (self.prefill, "prefill"),
            (self.decode, "decode"),
            (self.mixed, "mixed"),
        ];
        parts.into_iter().filter(|(part, _)| part.workers > 0)
    }

    /// GPUs of its largest workers.
    pub fn widest(&self) -> u32 {
        let widths = self.parts().map(|(part, _)| part.tensor_parallel);
        widths.max().unwrap_or(1)
    }
}

/// Every way to use all of so many GPUs: at most one degree of tensor parallelism a role. Roles
/// are not strict.
pub fn all(gpus: u32, degrees: &[u32], max_batched_tokens: u32) -> Vec<Design> {
    let parts = |most: u32| {
        let of = move |tensor_parallel: &u32| {
            let tensor_parallel = *tensor_parallel;
            (1..=most / tensor_parallel).map(move |workers| Part {
                workers,
                tensor_parallel,
            })
        };
        let some = degrees.iter().flat_map(of);
        std::iter::once(Part::default())
            .chain(some)
            .collect::<Vec<_>>()
    };
    let mut designs = Vec::new();
    for mixed in parts(gpus) {
        let rest = gpus - mixed.gpus();
        if rest == 0 {
            designs.push(Design {
                prefill: Part::default(),
                decode: Part::default(),
                mixed,
                max_batched_tokens,
                prefill_max_batched_tokens: None,
                strict_roles: false,
            });
            continue;
        }
        for prefill in parts(rest) {
            let rest = rest - prefill.gpus();
            for &tensor_parallel in degrees
                .iter()
                .filter(|degree| rest.is_multiple_of(**degree))
            {
                let workers = rest / tensor_parallel;
                let decode = if workers == 0 {
                    Part::default()
                } else {
                    Part {
                        workers,
                        tensor_parallel,
                    }
                };
                let both = prefill.workers > 0 && decode.workers > 0;
                let helped = mixed.workers > 0 && prefill.workers + decode.workers > 0;
                if both || helped {
                    designs.push(Design {
                        prefill,
                        decode,
                        mixed,
                        max_batched_tokens,
                        prefill_max_batched_tokens: None,
                        strict_roles: false,
                    });
                }
                if workers == 0 {
                    break;
                }
            }
        }
    }
    designs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_design_uses_all_gpus_once() {
        let designs = all(4, &[1, 2], 2_048);
        for design in &designs {
            let gpus = design.prefill.gpus() + design.decode.gpus() + design.mixed.gpus();
            assert_eq!(gpus, 4, "{}", design.name());
        }
        let mut names: Vec<String> = designs.iter().map(Design::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        for name in [
            "4 mixed",
            "2 mixed x2",
            "1 prefill x2 + 2 decode",
            "1 decode + 3 mixed",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}: {names:?}");
        }
        assert!(!names.contains(&"4 prefill".to_owned()));
    }

    #[test]
    fn prefill_workers_may_have_steps_of_their_own() {
        let split = all(2, &[1], 1_024).into_iter().find(Design::is_split);
        let split = split.expect("a split").sized(2_048, Some(8_192));
        assert_eq!(split.steps(), "8192/2048");
        assert_eq!(split.step_tokens(Role::Prefill), 8_192);
        assert_eq!(split.step_tokens(Role::Decode), 2_048);
        assert_eq!(split.step_tokens(Role::Mixed), 2_048);
        let same = split.sized(2_048, Some(2_048));
        assert_eq!(
            (same.steps(), same.prefill_max_batched_tokens),
            ("2048".into(), None)
        );
    }

    #[test]
    fn a_lost_worker_leaves_the_others_unless_none_can_serve() {
        let of = |gpus, name: &str| {
            let designs = all(gpus, &[1], 1_024);
            designs.into_iter().find(|d| d.name() == name).unwrap()
        };
        let split = of(2, "1 prefill + 1 decode");
        assert_eq!(split.without(Role::Prefill).unwrap().name(), "1 decode");
        assert_eq!(split.without(Role::Mixed), None);
        let strict = split.strict().expect("two roles");
        assert_eq!(strict.without(Role::Prefill), None);
        let more = of(3, "1 prefill + 2 decode").strict();
        assert_eq!(more.unwrap().without(Role::Decode).unwrap().gpus(), 2);
        assert_eq!(of(1, "1 mixed").without(Role::Mixed), None);
    }

    #[test]
    fn only_workers_of_several_roles_may_have_strict_ones() {
        for design in all(3, &[1], 1_024) {
            let strict = design.strict();
            assert_eq!(
                strict.is_some(),
                !design.is_colocated(),
                "{}",
                design.name()
            );
            if let Some(strict) = strict {
                assert!(strict.strict_roles && !design.strict_roles);
                assert_eq!(strict.name(), format!("{}, strict", design.name()));
                assert_eq!(strict.gpus(), design.gpus());
            }
        }
    }
}
