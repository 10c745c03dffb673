//! Parses `/proc/PID/fdinfo/FD` of a GPU, as in the kernel's Documentation/gpu/drm-usage-stats.rst.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DrmClient {
    /// `drm-driver`: `amdgpu`, `i915`, `xe`, …
    pub(super) driver: String,
    /// `drm-pdev`: the PCI address.
    pub(super) pci: Option<String>,
    /// `drm-client-id`: files with the same id on one device belong to one client, counted once.
    pub(super) id: Option<u64>,
    /// Bytes of device memory, summed over its regions; `None` if the driver reports no region.
    pub(super) vram: Option<u64>,
}

/// Prefixes of the keys for a client's bytes in a memory region, the best first: now in device memory; the
/// same under an older name; allocated, including bytes swapped out.
const MEMORY_KEYS: [&str; 3] = ["drm-resident-", "drm-memory-", "drm-total-"];

/// Parses one file; `None` if it does not describe a DRM device.
pub(super) fn parse(text: &str) -> Option<DrmClient> {
    let mut client = DrmClient::default();
    let mut driver = None;
    // One sum for each prefix: a driver reports all its regions with the same prefixes.
    let mut sums: [Option<u64>; MEMORY_KEYS.len()] = [None; MEMORY_KEYS.len()];
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let key = key.trim();
        let value = value.trim();
        match key {
            "drm-driver" => driver = Some(value.to_owned()),
            "drm-pdev" => client.pci = Some(value.to_ascii_lowercase()),
            "drm-client-id" => client.id = value.parse().ok(),
            _ => {
                for (kind, sum) in MEMORY_KEYS.iter().zip(&mut sums) {
                    let region = key.strip_prefix(kind).filter(|region| is_device_memory(region));
                    if let Some(bytes) = region.and_then(|_| parse_size(value)) {
                        *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
                    }
                }
            }
        }
    }
    client.driver = driver?;
    client.vram = sums.into_iter().flatten().next();
    Some(client)
}

/// Regions other than `vram`, `vram0` or `local0` (`gtt`, `cpu`, `stolen…`) are host memory.
fn is_device_memory(region: &str) -> bool {
    let number = region.strip_prefix("vram").or_else(|| region.strip_prefix("local"));
    number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses `1024 KiB`, `3 MiB`, or a number of bytes such as `512`.
fn parse_size(text: &str) -> Option<u64> {
    let mut words = text.split_ascii_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    let unit: u64 = match words.next() {
        None | Some("B") => 1,
        Some("KiB") => 1 << 10,
        Some("MiB") => 1 << 20,
        Some("GiB") => 1 << 30,
        Some(_) => return None,
    };
    if words.next().is_some() { None } else { number.checked_mul(unit) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_resident_figure_of_amdgpu_wins_over_the_old_name_and_the_total() {
        let text = "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t42\ndrm-pdev:\t0000:03:00.0\n\
                    pasid:\t32778\ndrm-total-vram:\t9000 KiB\ndrm-memory-vram:\t8000 KiB\n\
                    drm-resident-vram:\t7 MiB\ndrm-memory-gtt: \t20 KiB\ndrm-memory-cpu: \t9 KiB\n\
                    amd-memory-visible-vram:\t1 KiB\namd-evicted-vram:\t5 KiB\n";
        let client = parse(text).unwrap();
        assert_eq!(client.driver, "amdgpu");
        assert_eq!((client.pci.as_deref(), client.id), (Some("0000:03:00.0"), Some(42)));
        assert_eq!(client.vram, Some(7 << 20));
    }

    #[test]
    fn the_old_name_alone_is_read_too() {
        let text = "drm-driver:\tamdgpu\ndrm-memory-vram:\t8000 KiB\n";
        assert_eq!(parse(text).unwrap().vram, Some(8000 << 10));
    }

    #[test]
    fn the_regions_of_i915_and_of_each_tile_of_xe_are_device_memory_and_system_memory_is_not() {
        let i915 = "drm-driver: i915\ndrm-resident-system0: 100 MiB\ndrm-resident-local0: 5 MiB\n";
        assert_eq!(parse(i915).unwrap().vram, Some(5 << 20));
        let xe = "drm-driver:\txe\ndrm-resident-gtt:\t9 KiB\ndrm-resident-vram0:\t3 MiB\ndrm-resident-vram1:\t4096\n";
        assert_eq!(parse(xe).unwrap().vram, Some((3 << 20) + 4096));
        let integrated =
            "drm-driver: i915\ndrm-resident-system0: 100 MiB\ndrm-resident-stolen-system0: 1 MiB\n";
        assert_eq!(parse(integrated).unwrap().vram, None);
    }

    #[test]
    fn a_file_of_something_else_is_no_client() {
        assert_eq!(parse("pos:\t0\nflags:\t0100002\nmnt_id:\t15\n"), None);
    }

    #[test]
    fn what_is_no_size_is_not_told_instead_of_zero() {
        for value in ["", "x", "-1 KiB", "1 kB", "1 KiB more", "18446744073709551615 MiB"] {
            let text = format!("drm-driver: amdgpu\ndrm-resident-vram: {value}\n");
            assert_eq!(parse(&text).unwrap().vram, None, "{value}");
        }
    }

    fn line() -> impl Strategy<Value = String> {
        let key = prop_oneof![
            Just("drm-driver".to_owned()),
            Just("drm-client-id".to_owned()),
            "drm-(resident|memory|total)-(vram|local|gtt)[0-9]{0,2}",
            "[ -~]{0,20}"
        ];
        (key, "[:\t ]{0,3}", "([0-9]{0,25} ?([KMGT]iB)?|\\PC{0,20})")
            .prop_map(|(a, b, c)| format!("{a}{b}{c}"))
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(lines in proptest::collection::vec(line(), 0..20), junk in "\\PC*") {
            let _parsed = parse(&junk);
            let _parsed = parse(&lines.join("\n"));
        }

        #[test]
        fn every_size_in_kib_comes_back_in_bytes(kib in 0_u64..1 << 40) {
            let text = format!("drm-driver: xe\ndrm-resident-vram0: {kib} KiB\n");
            prop_assert_eq!(parse(&text).unwrap().vram, Some(kib << 10));
        }
    }
}
