// Which instructions an instance requires that this processor lacks; build.rs includes it too.

macro_rules! missing {
    ($name:ident: $($feature:tt),+) => {
        #[cfg(target_arch = "x86_64")]
        pub fn $name() -> Vec<&'static str> {
            [$(($feature, is_x86_feature_detected!($feature))),+]
                .into_iter()
                .filter_map(|(feature, found)| (!found).then_some(feature))
                .collect()
        }

        #[cfg(not(target_arch = "x86_64"))]
        pub fn $name() -> Vec<&'static str> {
            vec![$($feature),+]
        }
    };
}

missing!(missing_avx2: "avx2", "fma");
missing!(missing_avx512: "avx2", "fma", "avx512f", "avx512bw", "avx512vl");
missing!(missing_avx512_bf16: "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16");
