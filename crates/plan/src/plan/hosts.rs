//! Which host each worker of a design is on, and whether all have one.

use super::design::Design;

impl Design {
    /// The host of each worker, those that prefill first, then those that decode. The largest get
    /// their GPUs first. None has GPUs of two hosts unless it needs more than one.
    pub fn hosts(&self, gpus_per_host: u32) -> Vec<u32> {
        let parts = [self.prefill, self.decode, self.mixed];
        let mut hosts = [const { Vec::new() }; 3];
        let mut free: Vec<u32> = Vec::new();
        for at in self.largest_first() {
            let each = parts[at].tensor_parallel;
            let mut host = 0;
            for _ in 0..parts[at].workers {
                while free.get(host).is_some_and(|free| *free < each) {
                    host += 1;
                }
                if host == free.len() {
                    // Of one that needs several hosts, the first.
                    let needed = each.div_ceil(gpus_per_host).max(1);
                    free.extend(std::iter::repeat_n(gpus_per_host, needed as usize));
                }
                hosts[at].push(host as u32);
                let mut left = each;
                for free in &mut free[host..] {
                    let taken = left.min(*free);
                    *free -= taken;
                    left -= taken;
                    if left == 0 {
                        break;
                    }
                }
            }
        }
        hosts.concat()
    }

    /// Whether so many GPUs, so many a host, have room for each worker on one host, or on as few as
    /// it needs.
    pub fn fits(&self, gpus: u32, gpus_per_host: u32) -> bool {
        let parts = [self.prefill, self.decode, self.mixed];
        // Of hosts with equally many free GPUs: these, and how many hosts.
        let mut hosts = vec![
            (gpus_per_host, gpus / gpus_per_host),
            (gpus % gpus_per_host, 1),
        ];
        for part in self.largest_first().map(|at| parts[at]) {
            let each = part.tensor_parallel;
            if part.workers == 0 || each > gpus_per_host {
                continue;
            }
            let mut left = part.workers;
            let mut after = Vec::new();
            for (free, count) in hosts {
                let holds = free / each;
                let full = left.checked_div(holds).unwrap_or(0).min(count);
                left -= full * holds;
                after.push((free - holds * each, full));
                let partly = u32::from(full < count && left > 0 && holds > 0);
                if partly > 0 {
                    after.push((free - std::mem::take(&mut left) * each, 1));
                }
                after.push((free, count - full - partly));
            }
            after.retain(|(_, count)| *count > 0);
            hosts = after;
            if left > 0 {
                return false;
            }
        }
        true
    }

    /// Prefill, decode and mixed workers by their numbers 0, 1 and 2.
    fn largest_first(&self) -> [usize; 3] {
        let parts = [self.prefill, self.decode, self.mixed];
        let mut order = [0, 1, 2];
        order.sort_by_key(|&at: &usize| std::cmp::Reverse(parts[at].tensor_parallel));
        order
    }
}

#[cfg(test)]
mod tests {
    use super::super::design::{Part, all};
    use super::*;

    #[test]
    fn no_worker_has_gpus_of_two_hosts() {
        let part = |workers, tensor_parallel| Part {
            workers,
            tensor_parallel,
        };
        let design = Design {
            prefill: part(4, 1),
            decode: part(1, 8),
            mixed: part(2, 2),
            ..all(1, &[1], 1_024)[0]
        };
        // The decode worker has all of the first host.
        assert_eq!(design.hosts(8), [1, 1, 1, 1, 0, 1, 1]);
        assert_eq!(design.hosts(16), [0; 7]);
        let mixed = Design {
            mixed: part(6, 2),
            ..all(1, &[1], 1_024)[0]
        };
        assert_eq!(mixed.hosts(4), [0, 0, 1, 1, 2, 2]);
        let pairs = Design {
            prefill: part(1, 4),
            mixed: part(2, 2),
            ..mixed
        };
        assert_eq!(pairs.hosts(6), [0, 0, 1]);
        let wide = Design {
            decode: part(2, 16),
            mixed: part(2, 1),
            ..mixed
        };
        assert_eq!(wide.hosts(8), [0, 2, 4, 4]);
    }

    #[test]
    fn what_fits_is_what_can_be_placed() {
        for gpus_per_host in 1..=9 {
            for gpus in 1..=14 {
                let degrees = [1, 2, 3, 4, 8].into_iter();
                let degrees: Vec<u32> = degrees.filter(|d| *d <= gpus_per_host).collect();
                for design in all(gpus, &degrees, 1_024) {
                    let hosts = design.hosts(gpus_per_host);
                    let mut free = vec![gpus_per_host; (gpus / gpus_per_host) as usize];
                    free.push(gpus % gpus_per_host);
                    let parts = [design.prefill, design.decode, design.mixed].into_iter();
                    let sizes = parts.flat_map(|part| {
                        std::iter::repeat_n(part.tensor_parallel, part.workers as usize)
                    });
                    let mut placed = true;
                    for (host, size) in hosts.iter().zip(sizes) {
                        let host = free.get_mut(*host as usize);
                        let left = host.map(|free| (free.checked_sub(size), free));
                        match left {
                            Some((Some(left), free)) => *free = left,
                            _ => placed = false,
                        }
                    }
                    let name = design.name();
                    let fits = design.fits(gpus, gpus_per_host);
                    assert_eq!(fits, placed, "{name} of {gpus}, {gpus_per_host} a host");
                    let even = degrees.iter().all(|degree| gpus_per_host % degree == 0);
                    assert!(fits || !even, "{name} of {gpus}, {gpus_per_host} a host");
                }
            }
        }
    }
}
