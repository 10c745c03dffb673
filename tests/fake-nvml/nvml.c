/* A libnvidia-ml.so of our own for tests: it answers what a script says. The script is a text file, read anew for every
 * call, so a test can change it while the library is loaded. SCRIPT is its path, given when compiling.
 *
 *     device PARENT TOTAL USED BUS UUID NAME...   a GPU (parent -1), or a MIG instance of GPU number PARENT
 *     compute DEVICE PID BYTES                    a process in the list of compute processes; BYTES may be "unknown"
 *     graphics DEVICE PID BYTES                   the same for graphics
 *     ecc DEVICE COUNT                            uncorrected errors
 *     xid DEVICE NUMBER                           an event; each line is told once
 *     fail FUNCTION CODE                          the function returns this code instead
 *     log PATH                                    each call appends its name there
 *
 * Devices are numbered by their lines, from 0. -DOLD leaves out what drivers before 510 do not have.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINES 64
#define OK 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TOO_SMALL 7
#define TIMEOUT 10

typedef struct { char word[8][128]; int words; } line_t;
typedef struct { line_t line[LINES]; int lines; } script_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } process_t;
typedef struct { void *device; unsigned long long type, data; unsigned instance, compute; } event_t;
typedef struct { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;

static script_t read_script(void) {
    script_t script = {0};
    char text[1024];
    FILE *file = fopen(SCRIPT, "r");
    while (file && script.lines < LINES && fgets(text, sizeof text, file)) {
        line_t *line = &script.line[script.lines];
        line->words = 0;
        /* Not strtok: its state is one for the whole process, and tests call several of these libraries at a time. */
        char *rest = NULL;
        for (char *word = strtok_r(text, " \n", &rest); word && line->words < 8; word = strtok_r(NULL, " \n", &rest))
            snprintf(line->word[line->words++], 128, "%s", word);
        script.lines += line->words > 1;
    }
    if (file) fclose(file);
    return script;
}

/* The code that the script wants of a function, or 0. */
static int asked(const script_t *script, const char *function) {
    int code = OK;
    for (int i = 0; i < script->lines; i++) {
        const line_t *line = &script->line[i];
        if (!strcmp(line->word[0], "fail") && !strcmp(line->word[1], function)) code = atoi(line->word[2]);
        if (!strcmp(line->word[0], "log")) {
            FILE *log = fopen(line->word[1], "a");
            if (log) { fprintf(log, "%s\n", function); fclose(log); }
        }
    }
    return code;
}

/* The line of device `number`, counted from 0. */
static const line_t *device(const script_t *script, int number) {
    for (int i = 0; i < script->lines; i++)
        if (!strcmp(script->line[i].word[0], "device") && number-- == 0) return &script->line[i];
    return NULL;
}

/* One word of the line of a device; empty if there is no such line, as when the script has gone. */
static const char *word(const script_t *script, int number, int nth) {
    const line_t *line = device(script, number);
    return line && nth < line->words ? line->word[nth] : "";
}

/* The number of the nth device with this parent, or -1. */
static int child(const script_t *script, int parent, int nth) {
    const line_t *line;
    for (int i = 0; (line = device(script, i)); i++)
        if (atoi(line->word[1]) == parent && nth-- == 0) return i;
    return -1;
}

static int number(void *handle) { return (int)(long)handle - 1; }
static void *handle(int number) { return (void *)(long)(number + 1); }

#define BEGIN(name) script_t script = read_script(); int code = asked(&script, name); if (code) return code

int nvmlInit_v2(void) { BEGIN("init"); return OK; }
int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.1"); return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN("count");
    for (*count = 0; child(&script, -1, *count) >= 0;) ++*count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    BEGIN("handle");
    int found = child(&script, -1, index);
    *out = handle(found);
    return found < 0 ? NOT_FOUND : OK;
}

int nvmlDeviceGetIndex(void *of, unsigned *index) {
    BEGIN("index");
    for (*index = 0; *index < LINES; ++*index)
        if (child(&script, -1, *index) == number(of)) return OK;
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(void *of, unsigned *current, unsigned *pending) {
    BEGIN("mig");
    *current = *pending = child(&script, number(of), 0) >= 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *of, unsigned *count) { *count = 7; return of ? OK : NOT_FOUND; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *of, unsigned index, void **out) {
    BEGIN("instance");
    int found = child(&script, number(of), index);
    *out = handle(found);
    return found < 0 ? NOT_FOUND : OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *of, memory_t *out) {
    BEGIN("memory");
    out->total = strtoull(word(&script, number(of), 2), NULL, 10);
    out->used = strtoull(word(&script, number(of), 3), NULL, 10);
    out->free = out->total - out->used;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *of, pci_t *out) {
    BEGIN("pci");
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", word(&script, number(of), 4));
    return OK;
}

int nvmlDeviceGetUUID(void *of, char *text, unsigned size) {
    BEGIN("uuid");
    snprintf(text, size, "%s", word(&script, number(of), 5));
    return OK;
}

int nvmlDeviceGetName(void *of, char *text, unsigned size) {
    BEGIN("name");
    const char *last = word(&script, number(of), 7);
    snprintf(text, size, "%s%s%s", word(&script, number(of), 6), *last ? " " : "", last);
    return OK;
}

int nvmlDeviceGetTemperature(void *of, int sensor, unsigned *out) {
    BEGIN("temperature");
    *out = 40 + number(of) + sensor;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *of, int kind, int counter, unsigned long long *out) {
    BEGIN("ecc");
    (void)kind, (void)counter;
    for (int i = 0; i < script.lines; i++) {
        const line_t *line = &script.line[i];
        if (!strcmp(line->word[0], "ecc") && atoi(line->word[1]) == number(of)) {
            *out = strtoull(line->word[2], NULL, 10);
            return OK;
        }
    }
    return NOT_SUPPORTED;
}

int nvmlDeviceGetSupportedEventTypes(void *of, unsigned long long *out) {
    BEGIN("events");
    *out = 1 | 8;
    return of ? OK : NOT_FOUND;
}

/* A set knows its device and how many of its lines it has told. */
typedef struct { void *device; int told; } set_t;

int nvmlEventSetCreate(void **out) { *out = calloc(1, sizeof(set_t)); return OK; }
int nvmlEventSetFree(void *set) { free(set); return OK; }

int nvmlDeviceRegisterEvents(void *of, unsigned long long types, void *set) {
    BEGIN("register");
    ((set_t *)set)->device = of;
    return types == 8 ? OK : NOT_SUPPORTED;
}

int nvmlEventSetWait_v2(void *any, event_t *out, unsigned timeout) {
    BEGIN("wait");
    set_t *set = any;
    int nth = set->told;
    for (int i = 0; i < script.lines; i++) {
        const line_t *line = &script.line[i];
        if (!strcmp(line->word[0], "xid") && atoi(line->word[1]) == number(set->device) && nth-- == 0) {
            set->told++;
            *out = (event_t){.device = set->device, .type = 8, .data = strtoull(line->word[2], NULL, 10)};
            return OK;
        }
    }
    return timeout ? NOT_SUPPORTED : TIMEOUT;
}

#ifndef OLD
static int list(const char *kind, void *of, unsigned *count, process_t *out) {
    BEGIN(kind);
    unsigned room = out ? *count : 0, found = 0;
    for (int i = 0; i < script.lines; i++) {
        const line_t *line = &script.line[i];
        if (strcmp(line->word[0], kind) || atoi(line->word[1]) != number(of)) continue;
        if (found < room) {
            int known = strcmp(line->word[3], "unknown");
            out[found] = (process_t){atoi(line->word[2]), known ? strtoull(line->word[3], NULL, 10) : -1ULL, -1, -1};
        }
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *of, unsigned *count, process_t *out) {
    return list("compute", of, count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *of, unsigned *count, process_t *out) {
    return list("graphics", of, count, out);
}
#endif
