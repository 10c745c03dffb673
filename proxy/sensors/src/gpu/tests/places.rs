//! Containers, Windows, and estimates: identifying a pid, and conclusions if it cannot be identified.

use super::*;

const EMPTY: &str = "device -1 25769803776 3145728 00000000:65:00.0 GPU-a NVIDIA L4\n";

/// Describes the device with this many bytes in use.
fn used(bytes: u64, lists: &str) -> String {
    format!("device -1 25769803776 {bytes} 00000000:65:00.0 GPU-a NVIDIA L4\n{lists}")
}

/// Returns the VRAM after a spawn, with a baseline from before it.
fn across(machine: &Machine, before: &str, after: &str, alone: bool) -> GroupVram {
    machine.script(before);
    let gpus = machine.open();
    let baseline = gpus.read().baseline();
    machine.script(after);
    gpus.read().child_vram(100, &[], Some((&baseline, alone)))
}

fn doubt(found: &GroupVram) -> EstimateDoubt {
    match found.unavailable.clone() {
        Some(VramUnknown::Hidden { doubt, .. } | VramUnknown::NoBytes { doubt, .. }) => doubt,
        other => panic!("{other:?} {found:?}"),
    }
}

fn container() -> Machine {
    let machine = Machine::new().nvml(EMPTY, &[]);
    machine.namespace("4026532999");
    machine.process(100, 100);
    machine
}

#[test]
fn a_list_without_bytes_becomes_an_estimate_where_nobody_else_is_on_the_device() {
    let machine = Machine::new().nvml(EMPTY, &[]);
    machine.process(100, 100).process(200, 200);
    let after = used(3 * MIB + 2 * GIB, "compute 0 100 0\n");
    let found = across(&machine, EMPTY, &after, true);
    assert_eq!(found.readings, [vram(0, 2 * GIB, VramSource::Estimate)]);
    assert_eq!(found.unavailable, None);

    assert_eq!(doubt(&across(&machine, EMPTY, &after, false)), EstimateDoubt::NotAlone);
    let crowded = used(9 * GIB, "compute 0 100 0\ncompute 0 200 0\n");
    assert_eq!(doubt(&across(&machine, EMPTY, &crowded, true)), EstimateDoubt::Shared);
    let before = used(GIB, "compute 0 200 0\n");
    assert_eq!(doubt(&across(&machine, &before, &after, true)), EstimateDoubt::WasInUse);
    let mute = format!("{after}fail memory 999\n");
    assert_eq!(doubt(&across(&machine, EMPTY, &mute, true)), EstimateDoubt::NoTotals);
}

#[test]
fn on_a_host_a_screen_without_a_listed_process_is_no_hindrance() {
    let machine = Machine::new().nvml(EMPTY, &[]);
    machine.process(100, 100);
    let found = across(&machine, &used(700 * MIB, ""), &used(700 * MIB + GIB, "compute 0 100 0\n"), true);
    assert_eq!(found.readings, [vram(0, GIB, VramSource::Estimate)]);
}

#[test]
fn in_a_container_with_an_empty_list_only_a_device_that_was_idle_is_estimated() {
    let machine = container();
    let found = across(&machine, EMPTY, &used(3 * MIB + GIB, ""), true);
    assert_eq!(found.readings, [vram(0, GIB, VramSource::Estimate)]);
    let found = across(&machine, &used(700 * MIB, ""), &used(2 * GIB, ""), true);
    assert_eq!((found.readings.len(), doubt(&found)), (0, EstimateDoubt::WasInUse));
    let found = across(&machine, EMPTY, EMPTY, true);
    assert_eq!(found.unavailable, Some(VramUnknown::NotOnAny));
}

#[test]
fn in_a_container_one_unknown_process_is_ours_and_two_are_not() {
    let machine = container();
    let found = across(&machine, EMPTY, &used(3 * MIB + GIB, "compute 0 54321 1000\n"), true);
    assert_eq!(found.readings, [vram(0, GIB, VramSource::Estimate)]);
    let two = used(3 * MIB + GIB, "compute 0 54321 1000\ncompute 0 54322 1000\n");
    let found = across(&machine, EMPTY, &two, true);
    assert_eq!(doubt(&found), EstimateDoubt::Shared);
    assert!(found.unavailable.unwrap().sentence().contains("container"));
}

#[test]
fn in_a_container_the_right_pid_with_bytes_is_believed() {
    let machine = container();
    machine.script(&used(GIB, "compute 0 100 900000000\n"));
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 900_000_000)]);
}

#[test]
fn without_any_list_the_estimate_needs_an_idle_device_too() {
    let machine = Machine::new().nvml(EMPTY, &["-DOLD"]);
    machine.process(100, 100);
    let found = across(&machine, EMPTY, &used(3 * MIB + GIB, ""), true);
    assert_eq!(found.readings, [vram(0, GIB, VramSource::Estimate)]);
    let found = across(&machine, &used(GIB, ""), &used(2 * GIB, ""), true);
    assert!(matches!(found.unavailable, Some(VramUnknown::NotListed { .. })), "{found:?}");
}

#[test]
fn where_windows_draws_its_desktop_nothing_is_estimated() {
    let machine = Machine::new().nvml(EMPTY, &[]);
    machine.process(100, 100).write("dxg", "");
    let found = across(&machine, EMPTY, &used(GIB, "compute 0 100 unknown\n"), true);
    assert_eq!(doubt(&found), EstimateDoubt::Windows);
}

/// Adds the host's view of our process 100 as 54321, with this start time.
fn seen_by_the_host(machine: &Machine, host_start: u64) {
    let stat = |start: u64| format!("100 (a) b) S {}{start} 0", "0 ".repeat(18));
    machine
        .write("proc/100/stat", &stat(777))
        .write("host/self/status", "NSpid:\t5000\t9\nNSpgid:\t5000\t9\n")
        .write("host/54321/status", "NSpid:\t54321\t100\nNSpgid:\t54321\t100\n")
        .write("host/54321/stat", &stat(host_start));
}

#[test]
fn the_hosts_view_of_processes_translates_what_the_driver_lists() {
    let machine = container();
    machine.script(&used(GIB, "compute 0 54321 900000000\n"));
    seen_by_the_host(&machine, 777);
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 900_000_000)]);
}

#[test]
fn the_same_small_pid_in_another_container_is_not_ours() {
    let machine = container();
    machine.script(&used(GIB, "compute 0 54321 900000000\n"));
    seen_by_the_host(&machine, 778);
    let found = machine.open().read().group_vram(100);
    assert_eq!(found, GroupVram { readings: Vec::new(), unavailable: Some(VramUnknown::NotOnAny) });
}

#[test]
fn where_the_hosts_view_is_mounted_in_place_of_ours_the_namespace_proves_it() {
    let machine = Machine::new().nvml(&used(GIB, "compute 0 54321 900000000\n"), &[]);
    machine.namespace("4026532999");
    machine
        .write("proc/self/status", "NSpid:\t5000\t9\nNSpgid:\t5000\t9\n")
        .write("proc/54321/status", "NSpid:\t54321\t100\nNSpgid:\t54321\t100\n");
    let read = || machine.open().read().group_vram(100).readings;
    assert_eq!(read(), []);
    fs::create_dir_all(machine.path("proc/54321/ns")).unwrap();
    symlink("pid:[4026532999]", machine.path("proc/54321/ns/pid")).unwrap();
    assert_eq!(read(), [told(0, 900_000_000)]);
}

#[test]
fn a_sandbox_that_shows_no_namespaces_is_read_by_its_plain_ids() {
    let machine = container();
    machine.script(&used(GIB, "compute 0 101 900000000\n"));
    machine
        .write("proc/self/status", "Name:\tx\nTgid:\t9\n")
        .write("proc/101/status", "Name:\tx\nTgid:\t101\n")
        .write("proc/101/stat", "101 (x) S 100 100 0");
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 900_000_000)]);
}

#[test]
fn a_process_that_has_just_ended_and_is_still_listed_spoils_no_estimate() {
    let machine = container();
    let before = used(3 * MIB, "compute 0 54000 0\n");
    let found = across(&machine, &before, &used(3 * MIB + GIB, ""), true);
    assert_eq!(found.readings, [vram(0, GIB, VramSource::Estimate)]);
}

#[test]
fn in_a_container_a_gpu_whose_use_did_not_change_is_not_ours_whoever_has_it() {
    let machine = container();
    let found = across(&machine, &used(9 * GIB, ""), &used(9 * GIB + MIB, ""), true);
    assert_eq!(found.unavailable, Some(VramUnknown::NotOnAny));
}
