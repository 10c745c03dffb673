//! NVML, through nvml-wrapper and a real shared library.

use super::*;

const H200: &str = "device -1 150754820096 5368709120 00000000:65:00.0 GPU-aaaa NVIDIA H200\n";
const SMALL: &str = "device -1 25769803776 1073741824 00000000:B3:00.0 GPU-bbbb NVIDIA L4\n";

#[test]
fn two_devices_are_described_and_read() {
    let machine = Machine::new().nvml(&format!("{H200}{SMALL}"), &[]);
    let gpus = machine.open();
    let expected = GpuDevice {
        index: GpuIndex(1),
        vendor: GpuVendor::Nvidia,
        name: "NVIDIA L4".to_owned(),
        uuid: Some("GPU-bbbb".to_owned()),
        pci: Some("0000:b3:00.0".to_owned()),
        total: Some(24 * GIB),
        unified: false,
    };
    assert_eq!(gpus.devices().len(), 2);
    assert_eq!(gpus.devices()[1], expected);
    assert!(gpus.notes().is_empty());
    let read = gpus.read();
    let second = &read.devices()[1];
    assert_eq!(second.index, GpuIndex(1));
    assert_eq!((second.total, second.used, second.free), (Some(24 * GIB), Some(GIB), Some(23 * GIB)));
    let free: Vec<_> = read.devices().iter().filter_map(|read| Some((read.index, read.free?))).collect();
    assert_eq!((gpus.free(), free.len()), (free, 2), "asked for alone");
    assert_eq!(second.temperature, Some(41));
    // The second GPU has no error counter, but reports events.
    assert_eq!((second.ecc_uncorrected, second.faults.as_deref()), (None, Some(&[][..])));
}

#[test]
fn compute_and_graphics_lists_are_joined_and_a_process_in_both_counts_once() {
    let lists = "compute 0 100 1000000\ngraphics 0 100 3000000\ncompute 0 101 500\ngraphics 1 101 7000000\n\
                 compute 0 200 9000000\n";
    let machine = Machine::new().nvml(&format!("{H200}{SMALL}{lists}"), &[]);
    machine.process(100, 100).process(101, 100).process(200, 200);
    let read = machine.open().read();
    let ours = read.group_vram(100);
    assert_eq!(ours.readings, [told(0, 3_000_500), told(1, 7_000_000)]);
    assert_eq!(ours.unavailable, None);
    assert_eq!(read.group_vram(200).readings, [told(0, 9_000_000)]);
    assert_eq!(
        read.group_vram(300),
        GroupVram { readings: Vec::new(), unavailable: Some(VramUnknown::NotOnAny) }
    );
}

#[test]
fn a_process_that_leads_no_group_is_found_by_its_own_pid() {
    let machine = Machine::new().nvml(&format!("{H200}compute 0 100 4096\n"), &[]);
    machine.process(100, 7);
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 4096)]);
}

#[test]
fn zero_bytes_and_no_value_are_unknown_and_the_other_gpu_is_known_nevertheless() {
    for bytes in ["0", "unknown"] {
        let lists = format!("compute 0 100 {bytes}\ncompute 1 100 4096\n");
        let machine = Machine::new().nvml(&format!("{H200}{SMALL}{lists}"), &[]);
        machine.process(100, 100);
        let found = machine.open().read().group_vram(100);
        assert_eq!(found.readings, [told(1, 4096)]);
        let why = found.unavailable.unwrap();
        assert_eq!(why, VramUnknown::NoBytes { gpu: GpuIndex(0), doubt: EstimateDoubt::NoBaseline });
        assert_eq!(
            why.sentence(),
            "the VRAM policy is off for GPU 0 because the driver lists this backend on GPU 0 but not the bytes that it holds; \
             and what was in use before it started is not known"
        );
    }
}

#[test]
fn a_list_with_bytes_for_one_of_two_members_is_no_figure() {
    let machine = Machine::new().nvml(&format!("{H200}compute 0 100 5000000\ncompute 0 101 0\n"), &[]);
    machine.process(100, 100).process(101, 100);
    assert_eq!(machine.open().read().group_vram(100).readings, []);
}

#[test]
fn a_driver_without_the_function_says_so_and_totals_are_there_all_the_same() {
    let machine = Machine::new().nvml(H200, &["-DOLD"]);
    machine.process(100, 100);
    let read = machine.open().read();
    assert_eq!(read.devices()[0].used, Some(5 * GIB));
    let why = read.group_vram(100).unavailable.unwrap();
    assert_eq!(
        why.to_string(),
        "the driver does not say which processes use GPU 0 (the driver is older than 510, which is the first that tells)"
    );
}

#[test]
fn whoever_looks_again_gets_the_library_that_is_open() {
    let machine = Machine::new().nvml(H200, &[]);
    let open = || std::ptr::from_ref(nvidia::open_library(&machine.libraries[0]).unwrap());
    assert_eq!((open(), machine.open().devices().len(), machine.open().devices().len()), (open(), 1, 1));
}

#[test]
fn without_the_library_there_is_no_device_and_the_reason_is_a_sentence() {
    let mut machine = Machine::new();
    machine.libraries = vec!["/nowhere/libnvidia-ml.so.1".into()];
    let gpus = machine.open();
    assert!(gpus.devices().is_empty());
    let why = gpus.read().group_vram(100).unavailable.unwrap();
    assert_eq!(why.to_string(), "no GPU is visible here: NVIDIA's libnvidia-ml.so.1 is not installed");
    assert!(why.is_normal());
}

#[test]
fn a_library_that_does_not_start_is_said_to_be_there_and_the_next_place_is_tried() {
    let mut machine = Machine::new().nvml(&format!("{H200}fail init 9\n"), &[]);
    let refused = machine.open();
    assert_eq!(refused.notes(), ["NVIDIA's libnvidia-ml.so.1 refused to start: NVIDIA driver is not loaded"]);
    machine.script(H200);
    machine.libraries.insert(0, "/nowhere/libnvidia-ml.so.1".into());
    assert_eq!(machine.open().devices().len(), 1);
}

#[test]
fn each_xid_and_each_new_memory_error_is_told_once() {
    let machine = Machine::new().nvml(&format!("{H200}ecc 0 5\n"), &[]);
    let gpus = machine.open();
    let faults = || gpus.read().devices()[0].faults.clone().unwrap();
    // Errors before the first reading are not new.
    assert_eq!(faults(), []);
    machine.script(&format!("{H200}ecc 0 7\nxid 0 31\nxid 0 31\nxid 0 79\n"));
    assert_eq!(faults(), [GpuFault::Xid(Some(31)), GpuFault::Xid(Some(79)), GpuFault::Ecc(2)]);
    assert_eq!(faults(), []);
    machine.script(&format!("{H200}ecc 0 0\n"));
    assert_eq!(faults(), []);
    machine.script(&format!("{H200}fail memory 15\nfail ecc 15\n"));
    assert_eq!(faults(), [GpuFault::Lost]);
    assert_eq!(faults(), []);
    // Errors between two readings are reported.
    machine.script(&format!("{H200}ecc 0 3\n"));
    assert_eq!(faults(), [GpuFault::Ecc(3)]);
}

#[test]
fn a_device_that_tells_no_faults_says_so_instead_of_none() {
    let machine = Machine::new().nvml(&format!("{H200}fail events 3\nfail temperature 3\n"), &[]);
    let read = machine.open().read();
    assert_eq!((read.devices()[0].faults.clone(), read.devices()[0].temperature), (None, None));
}

#[test]
fn instances_of_a_split_gpu_are_devices_of_their_own() {
    let script = "device -1 150754820096 9 00000000:65:00.0 GPU-aaaa NVIDIA H200\n\
                  device 0 17179869184 4294967296 0 MIG-cccc H200-1g\n\
                  device 0 34359738368 0 0 MIG-dddd H200-2g\n\
                  compute 1 100 4000000000\n";
    let machine = Machine::new().nvml(script, &[]);
    machine.process(100, 100);
    let gpus = machine.open();
    let uuids: Vec<_> = gpus.devices().iter().map(|device| device.uuid.clone().unwrap()).collect();
    assert_eq!(uuids, ["MIG-cccc", "MIG-dddd"]);
    assert_eq!(gpus.devices()[1].pci.as_deref(), Some("0000:65:00.0"));
    let read = gpus.read();
    assert_eq!(read.devices()[0].total, Some(16 * GIB));
    assert_eq!(read.group_vram(100).readings, [told(0, 4_000_000_000)]);
}

#[test]
fn a_gpu_that_uses_the_hosts_memory_is_left_to_the_host_series() {
    // GB10 reports that it has no memory of its own; Jetson boards are recognised by name.
    for (name, fail) in [("NVIDIA GB", "fail memory 3\n"), ("Orin (nvgpu)", "")] {
        let script = format!("device -1 100 50 0 GPU-a {name}\ncompute 0 100 5000000\n{fail}");
        let machine = Machine::new().nvml(&script, &[]);
        machine.process(100, 100);
        let gpus = machine.open();
        assert!(gpus.devices()[0].unified);
        assert_eq!(gpus.devices()[0].total, None);
        let found = gpus.read().group_vram(100);
        assert_eq!(found.readings, []);
        let why = found.unavailable.unwrap();
        assert_eq!(why.to_string(), "GPU 0 uses the host's memory, so the host series watches all there is");
    }
}

#[test]
fn one_reading_asks_the_driver_once_for_any_number_of_backends() {
    let machine = Machine::new().nvml(H200, &[]);
    let log = machine.path("log");
    let mut script = format!("{H200}log {}\n", log.display());
    for pid in 100..108 {
        writeln!(script, "compute 0 {pid} 1000000").unwrap();
        machine.process(pid, pid);
    }
    let gpus = machine.open();
    machine.script(&script);
    let read = gpus.read();
    let calls = || fs::read_to_string(&log).unwrap().lines().count();
    let before = calls();
    for pid in 100..108 {
        assert_eq!(read.group_vram(pid).readings, [told(0, 1_000_000)]);
    }
    assert_eq!(calls(), before);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn two_threads_that_read_two_libraries_do_not_disturb_each_other() {
    // Tests run concurrently in one process, and any thread may call NVML.
    let machines = [H200, SMALL].map(|script| Machine::new().nvml(script, &[]));
    std::thread::scope(|threads| {
        for (machine, total) in machines.iter().zip([150_754_820_096, 24 * GIB]) {
            threads.spawn(move || {
                for _ in 0..300 {
                    let gpus = machine.open();
                    let totals: Vec<_> = gpus.devices().iter().map(|device| device.total).collect();
                    assert_eq!(totals, [Some(total)]);
                    assert_eq!(gpus.read().devices()[0].total, Some(total));
                }
            });
        }
    });
}
