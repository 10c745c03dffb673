//! AMD and Intel, with artificial trees.

use super::*;

const AMD: &str = "sys/class/drm/card1/device/";
const ARC: &str = "sys/class/drm/card0/device/";

fn amd(machine: &Machine) {
    machine
        .write(&format!("{AMD}uevent"), "DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME=0000:03:00.0\n")
        .write(&format!("{AMD}mem_info_vram_total"), "25753026560\n")
        .write(&format!("{AMD}mem_info_vram_used"), "1073741824\n")
        .write(&format!("{AMD}hwmon/hwmon3/temp1_input"), "51000\n")
        .write("sys/class/drm/card1-DP-1/status", "disconnected\n");
}

/// Adds KFD's node for the card above, of a GPU alone or together with a CPU.
fn node(machine: &Machine, cores: u32) {
    let properties = format!("cpu_cores_count {cores}\nsimd_count 192\nlocation_id 768\ndomain 0\n");
    machine
        .write("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0\n")
        .write("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "61234\n")
        .write("sys/class/kfd/kfd/topology/nodes/1/properties", &properties);
}

/// Adds file `fd` of process `pid`: a GPU, with its driver's text.
fn open_gpu(machine: &Machine, pid: u32, fd: u32, text: &str) {
    machine.write(&format!("proc/{pid}/fdinfo/{fd}"), text);
    let folder = machine.path(&format!("proc/{pid}/fd"));
    fs::create_dir_all(&folder).unwrap();
    symlink("/dev/dri/renderD128", folder.join(fd.to_string())).unwrap();
}

fn client(id: u32, line: &str) -> String {
    format!("drm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\n{line}\n")
}

#[test]
fn an_amd_gpu_is_described_and_read_from_sysfs() {
    let machine = Machine::new();
    amd(&machine);
    let gpus = machine.open();
    let device = &gpus.devices()[0];
    assert_eq!((device.vendor, device.name.as_str()), (GpuVendor::Amd, "AMD 1002:744C"));
    assert_eq!((device.total, device.unified), (Some(25_753_026_560), false));
    let read = gpus.read();
    let reading = &read.devices()[0];
    assert_eq!((reading.used, reading.free), (Some(GIB), Some(25_753_026_560 - GIB)));
    assert_eq!(gpus.free(), [(GpuIndex(0), 25_753_026_560 - GIB)]);
    assert_eq!((reading.temperature, reading.faults.clone()), (Some(51), None));
}

#[test]
fn vulkan_memory_is_summed_over_clients_and_a_duplicated_file_counts_once() {
    let machine = Machine::new();
    amd(&machine);
    machine.process(100, 100);
    open_gpu(&machine, 100, 7, &client(1, "drm-resident-vram:\t100 MiB"));
    open_gpu(&machine, 100, 8, &client(1, "drm-resident-vram:\t100 MiB"));
    open_gpu(&machine, 100, 9, &client(2, "drm-memory-vram:\t2048 KiB"));
    // This file is no GPU, so the sensor does not open its fdinfo.
    symlink("/dev/null", machine.path("proc/100/fd/0")).unwrap();
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 102 * MIB)]);
}

#[test]
fn hip_memory_comes_from_kfd_and_is_not_added_to_what_files_tell_again() {
    let machine = Machine::new();
    amd(&machine);
    node(&machine, 0);
    machine.process(100, 100).process(200, 200);
    machine
        .write("sys/class/kfd/kfd/proc/100/vram_61234", "734003200\n")
        .write("sys/class/kfd/kfd/proc/200/vram_61234", "1048576\n")
        .write("sys/class/kfd/kfd/proc/100/pasid", "32770\n");
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 700 * MIB)]);
    open_gpu(&machine, 100, 7, &client(1, "drm-resident-vram:\t720 MiB"));
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 720 * MIB)]);
    assert_eq!(machine.open().read().group_vram(200).readings, [told(0, MIB)]);
}

#[test]
fn a_graphics_unit_inside_a_processor_is_left_to_the_host_series() {
    let machine = Machine::new();
    amd(&machine);
    node(&machine, 16);
    machine.process(100, 100);
    let gpus = machine.open();
    assert!(gpus.devices()[0].unified);
    assert_eq!(gpus.read().group_vram(100).unavailable, Some(VramUnknown::Unified(GpuIndex(0))));
}

#[test]
fn a_driver_that_tells_no_memory_is_unknown_and_not_zero() {
    let machine = Machine::new();
    amd(&machine);
    machine.process(100, 100);
    open_gpu(&machine, 100, 7, &client(1, "drm-engine-gfx:\t5 ns"));
    let found = machine.open().read().group_vram(100);
    assert_eq!(found.readings, []);
    assert!(found.unavailable.unwrap().to_string().contains("amdgpu driver does not tell"));
}

#[test]
fn an_intel_card_is_read_from_its_files_and_an_integrated_one_is_unified() {
    let machine = Machine::new();
    machine.write(&format!("{ARC}uevent"), "DRIVER=xe\nPCI_ID=8086:E20B\nPCI_SLOT_NAME=0000:04:00.0\n");
    machine.process(100, 100);
    let files = "drm-driver:\txe\ndrm-pdev:\t0000:04:00.0\ndrm-client-id:\t3\ndrm-resident-gtt:\t9 MiB\n\
                 drm-resident-vram0:\t640 MiB\n";
    open_gpu(&machine, 100, 5, files);
    let gpus = machine.open();
    assert_eq!((gpus.devices()[0].vendor, gpus.devices()[0].total), (GpuVendor::Intel, None));
    assert_eq!(gpus.read().devices()[0].used, None);
    assert_eq!(gpus.read().group_vram(100).readings, [told(0, 640 * MIB)]);
    machine.write(&format!("{ARC}uevent"), "DRIVER=i915\nPCI_ID=8086:46A6\nPCI_SLOT_NAME=0000:00:02.0\n");
    assert!(machine.open().devices()[0].unified);
}

#[test]
fn members_of_the_group_are_asked_too_and_other_cards_are_kept_apart() {
    let machine = Machine::new();
    amd(&machine);
    machine.process(100, 100).process(101, 100).write("proc/100/task/100/children", "101 ");
    machine.write("proc/101/stat", &format!("101 (x) S 100 100 {}", "0 ".repeat(48)));
    open_gpu(&machine, 101, 7, &client(1, "drm-resident-vram:\t3 MiB"));
    let elsewhere = client(2, "drm-resident-vram:\t50 MiB").replace(":03:", ":0a:");
    open_gpu(&machine, 101, 8, &elsewhere);
    assert_eq!(machine.open().read().group_vram(100).readings, [told(0, 3 * MIB)]);
}
